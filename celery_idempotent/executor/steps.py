"""Recovery points: parts of an execution that run once for a key, whoever runs the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from celery_idempotent.errors import LeaseLostError
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.payload.codec import step_field
from celery_idempotent.record import steps
from celery_idempotent.record.payload import Payload
from celery_idempotent.store import commands

if TYPE_CHECKING:
    from celery_idempotent.executor.active_execution import ActiveExecution


class Steps:
    """The finished steps of the execution that `running` is, those of its forerunners included."""

    def __init__(self, active: ActiveExecution, body: bytes) -> None:
        self._running = active
        self._body = body
        self._values: dict[str, Any] = {}

    async def run(self, name: str, work: Callable[[], Any]) -> Outcome:
        """How the step ends: as `work` does, or with the value that is kept."""
        if name not in self._values:
            kept = steps.read(self._body, self._running.execution.key).get(name)
            if kept is None:
                steps.write(name, "", b"")  # a name that cannot be kept is refused before the work
                outcome = await self._running.runtime.run(work)
                if isinstance(outcome, Failure):
                    return outcome
                await self._keep(name, outcome.value)
                self._values[name] = outcome.value
            else:
                self._values[name] = await self._load(name, Payload(*kept))
        return Result(self._values[name])

    async def _load(self, name: str, payload: Payload) -> Any:
        active = self._running
        load = partial(active.codec.load, payload, active.execution.key, step_field(name))
        return await active.runtime.run_in_thread(load) if active.codec.offloads else load()

    @property
    def finished(self) -> bytes:
        """The finished steps, as a record holds them."""
        return steps.without_errors(self._body)

    async def discard(self) -> None:
        """Delete from the depot what the execution's outcome has replaced."""
        active = self._running
        if active.codec.offloads and self._body:
            key = active.execution.key
            await active.runtime.run_in_thread(lambda: active.codec.discard_steps(self._body, key))

    async def _keep(self, name: str, value: Any) -> None:
        active = self._running
        payload = await active.payload(value, step_field(name))
        entry = steps.write(name, payload.format, payload.body)
        answer = await active.persist(
            commands.step(
                active.call.key,
                active.execution.token,
                entry,
                lease_ms=active.call.settings.lease_ms,
                retention_ms=active.call.settings.result_ms,
            )
        )
        if answer.case == "lost":
            active.report_lease_lost()
            raise LeaseLostError(f"{active.execution.key}: another execution has taken over")
        self._body += entry
