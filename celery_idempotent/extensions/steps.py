"""Steps: parts of an execution whose values are stored, so that they run once for a key.

The first step of a body imports it: see `Grant.steps`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from celery_idempotent.core.flow.call import Grant
from celery_idempotent.core.flow.extension import Extension
from celery_idempotent.core.flow.values import (
    Complete,
    Fail,
    Failure,
    Outcome,
    Result,
    Settlement,
    restored,
    step_that_has_run,
)
from celery_idempotent.core.record import Payload, step_field, steps
from celery_idempotent.core.store import commands
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.errors import IdempotencyError, LeaseLostError


class Steps(Extension):
    """The finished steps of an execution, including those of earlier executions of its call."""

    def __init__(self, grant: Grant) -> None:
        super().__init__(grant.call)
        self._grant = grant
        #: The names of the steps that are running in this execution.
        self._running: set[str] = set()
        #: The names of those that have run in it, or whose values it has read.
        self._finished: set[str] = set()
        #: Keeps two threads from beginning the same step.
        self._lock = threading.Lock()

    async def run(
        self, name: str, func: Callable[[], Any], *, in_transaction: bool = False
    ) -> Outcome:
        """Returns the outcome of the step: the value as the serializer restores it, or the error.

        Args:
            in_transaction: whether the body's transaction, not the record, keeps the value.
        """
        call = self.call
        key = str(call.key)
        with self._lock:
            self._check(name)
            stored = steps.read(self._grant.steps_body, key).get(name)
            (self._running if stored is None else self._finished).add(name)
        if stored is not None:
            return Result(await call.codec.decode_field(Payload(*stored), key, step_field(name)))
        try:
            return await self._run(name, func, in_transaction=in_transaction)
        finally:
            self._running.discard(name)

    def _check(self, name: str) -> None:
        """Refuses a step that may not begin."""
        steps.write(name, "", b"")  # refuses an invalid name
        if self._grant.settled:
            problem = "begins after the end of its execution"
        elif name in self._running:
            problem = "is running; give each step its own name"
        elif name in self._finished:
            problem = "has run before in this execution; give each step its own name"
        else:
            return
        raise IdempotencyError(f"{self.call.key}: step {name!r} {problem}")

    async def _run(self, name: str, func: Callable[[], Any], *, in_transaction: bool) -> Outcome:
        """Runs a step that has not run yet, and stores its value; an error is not stored."""
        call = self.call
        outcome = await call.runtime.run(func)
        if isinstance(outcome, Failure):
            return outcome
        value, settings, codec = step_that_has_run(name, outcome.value), call.settings, call.codec
        place: Any = {"key": str(call.key), "field": step_field(name)}
        payload, outcome = restored(value, settings, codec.values, **place)
        self._finished.add(name)
        if not in_transaction:
            payload = await codec.protect(payload, settings, token=self._grant.token, **place)
            await self._save(name, payload)
        return outcome

    async def settled(self, settlement: Settlement, reply: Reply) -> None:
        """Deletes offloaded values of steps."""
        call = self.call
        if isinstance(settlement, (Complete, Fail)):
            await call.codec.delete_step_objects(self._grant.steps_body, str(call.key))

    async def _save(self, name: str, payload: Payload) -> None:
        grant, entry = self._grant, steps.write(name, payload.format, payload.body)
        assert grant.lease is not None
        reply = await grant.write(commands.extend(grant.lease.extension, entry))
        if reply.case == "lost":
            grant.report_lease_lost(reply.raw)
            grant.execution.check()
            raise LeaseLostError(f"{self.call.key}: another execution has taken over")
        with self._lock:
            grant.steps_body += entry
