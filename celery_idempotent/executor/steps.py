"""Steps: parts of an execution whose values are stored, so that they run once for a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery_idempotent.errors import LeaseLostError
from celery_idempotent.executor.outcome import Failure, Outcome, Result
from celery_idempotent.executor.returned import restored
from celery_idempotent.payload.fields import step_field
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
        #: The values of the steps that this execution has run.
        self._payloads: dict[str, Payload] = {}

    async def run(self, name: str, func: Callable[[], Any]) -> Outcome:
        """The outcome of the step: the value of `func` as the serializer restores it, or its error.

        Each call restores the value anew: the caller may have changed the one that it got.
        """
        active = self._active
        key = active.execution.key
        if name in self._payloads:
            return Result(active.codec.values.restore(self._payloads[name]))
        stored = steps.read(self._body, key).get(name)
        if stored is not None:
            return Result(await active.codec.decode_step(Payload(*stored), key, name))
        steps.write(name, "", b"")  # refuses an invalid name before `func` runs
        outcome = await active.runtime.run(func)
        if isinstance(outcome, Failure):
            return outcome
        settings, values = active.call.settings, active.codec.values
        field = step_field(name)
        payload, outcome = restored(outcome.value, settings, values, key=key, field=field)
        await self._save(name, payload)
        if payload.has_value:
            self._payloads[name] = payload
        return outcome

    @property
    def finished(self) -> bytes:
        """The finished steps, as the body of a record."""
        return steps.without_errors(self._body)

    async def discard(self) -> None:
        """Deletes offloaded values of steps, which the outcome has replaced."""
        active = self._active
        await active.codec.delete_step_objects(self._body, active.execution.key)

    async def _save(self, name: str, payload: Payload) -> None:
        active = self._active
        settings = active.call.settings
        payload = await active.codec.protect(
            payload,
            settings,
            key=active.execution.key,
            token=active.execution.token,
            field=step_field(name),
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
            active.report_lease_lost(reply.raw)
            raise LeaseLostError(f"{active.execution.key}: another execution has taken over")
        self._body += entry
