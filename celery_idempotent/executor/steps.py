"""Recovery points: parts of an execution that run once for a key, whoever runs the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from celery_idempotent.errors import LeaseLostError
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.payload.codec import step_part
from celery_idempotent.record import steps
from celery_idempotent.record.payload import Payload
from celery_idempotent.store import commands

if TYPE_CHECKING:
    from celery_idempotent.executor.active_execution import Running


class Steps:
    """The finished steps of the execution that `running` is, those of its forerunners included."""

    def __init__(self, running: Running, body: bytes) -> None:
        self._running = running
        self._body = body
        self._values: dict[str, Any] = {}

    async def run(self, name: str, work: Callable[[], Any]) -> Outcome:
        """How the step ends: as `work` does, or with the value that is kept."""
        if name not in self._values:
            kept = steps.read(self._body, self._running.execution.key).get(name)
            if kept is None:
                steps.write(name, "", b"")  # a name that cannot be kept is refused before the work
                outcome = await self._running.world.run(work)
                if isinstance(outcome, Failure):
                    return outcome
                await self._keep(name, outcome.value)
                self._values[name] = outcome.value
            else:
                self._values[name] = await self._load(name, Payload(*kept))
        return Result(self._values[name])

    async def _load(self, name: str, payload: Payload) -> Any:
        running = self._running
        load = partial(running.payloads.load, payload, running.execution.key, step_part(name))
        return await running.world.apart(load) if running.payloads.offloads else load()

    @property
    def finished(self) -> bytes:
        """The finished steps, as a record holds them."""
        return steps.without_errors(self._body)

    async def discard(self) -> None:
        """Delete from the depot what the execution's outcome has replaced."""
        running = self._running
        if running.payloads.offloads and self._body:
            key = running.execution.key
            await running.world.apart(lambda: running.payloads.discard_steps(self._body, key))

    async def _keep(self, name: str, value: Any) -> None:
        running = self._running
        payload = await running.payload(value, step_part(name))
        entry = steps.write(name, payload.format, payload.body)
        answer = await running.persist(
            commands.step(
                running.call.key,
                running.execution.token,
                entry,
                lease_ms=running.call.settings.lease_ms,
                retention_ms=running.call.settings.result_ms,
            )
        )
        if answer.case == "lost":
            running.tell_loss()
            raise LeaseLostError(f"{running.execution.key}: another execution has taken over")
        self._body += entry
