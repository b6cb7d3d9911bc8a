"""Steps: parts of an execution whose values are stored, so that they run once for a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery_idempotent.errors import LeaseLostError
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.record import steps
from celery_idempotent.record.payload import Payload
from celery_idempotent.store import commands

if TYPE_CHECKING:
    from celery_idempotent.executor.active_execution import ActiveExecution


class Steps:
    """The finished steps of `active`, and of the executions before it."""

    def __init__(self, active: ActiveExecution, body: bytes) -> None:
        self._active = active
        self._body = body
        self._values: dict[str, Any] = {}

    async def run(self, name: str, func: Callable[[], Any]) -> Outcome:
        """The outcome of the step: that of `func`, or the stored value."""
        if name not in self._values:
            stored = steps.read(self._body, self._active.execution.key).get(name)
            if stored is None:
                steps.write(name, "", b"")  # refuses an invalid name before `func` runs
                outcome = await self._active.runtime.run(func)
                if isinstance(outcome, Failure):
                    return outcome
                await self._save(name, outcome.value)
                self._values[name] = outcome.value
            else:
                self._values[name] = await self._active.codec.decode_step(
                    Payload(*stored), self._active.execution.key, name
                )
        return Result(self._values[name])

    @property
    def finished(self) -> bytes:
        """The finished steps, as the body of a record."""
        return steps.without_errors(self._body)

    async def discard(self) -> None:
        """Deletes offloaded values of steps, which the outcome has replaced."""
        active = self._active
        await active.codec.delete_step_objects(self._body, active.execution.key)

    async def _save(self, name: str, value: Any) -> None:
        active = self._active
        settings = active.call.settings
        payload = await active.codec.encode_step(
            value, settings, key=active.execution.key, token=active.execution.token, name=name
        )
        entry = steps.write(name, payload.format, payload.body)
        reply = await active.persist(
            commands.save_step(
                active.call.key,
                active.execution.token,
                entry,
                lease_ms=settings.lease_ms,
                retention_ms=settings.result_ms,
            )
        )
        if reply.case == "lost":
            active.report_lease_lost()
            raise LeaseLostError(f"{active.execution.key}: another execution has taken over")
        self._body += entry
