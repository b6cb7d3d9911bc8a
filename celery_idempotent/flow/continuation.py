"""The continuation of a call: callbacks, the rest of a chain, a chord's count or errbacks.

Celery's tracer sends it, after the flow of the call has ended. Until it is marked as sent, the
heartbeat renews a lease in the record, or in the message's entry, so that no redelivery sends the
continuation at the same time. If the process dies, the lease expires or the parent process ends it,
and the next delivery sends the continuation.
"""

from __future__ import annotations

from collections import Counter

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.events import table
from celery_idempotent.events.report import report
from celery_idempotent.flow.active_call import ActiveCall
from celery_idempotent.key.canonical import canonical, digest
from celery_idempotent.key.key import ROOT_BYTES
from celery_idempotent.lease.clock import lease_now
from celery_idempotent.lease.lease import Lease
from celery_idempotent.store import commands
from celery_idempotent.store.commands import LeaseExtension
from celery_idempotent.store.run_sync import run_sync


class Continuation:
    """The right of one delivery to send the continuation of its call; for code that blocks.

    Its lease is renewed from now on.
    """

    def __init__(self, call: ActiveCall) -> None:
        #: Whether the call has returned a value; else it has raised an error.
        self.follows_value = False
        self._call = call
        self._runtime = call.runtime
        settings, root, execution_id = call.settings, call.data.root, call.execution_id
        self._delivery = call.key, root, execution_id
        extension = LeaseExtension(
            call.key, 0, settings.lease_ms, settings.result_ms, root, execution_id
        )
        self._lease = Lease(call.runtime.store, extension, lease_now(), self._lost)
        #: Number of messages published so far, by task and task id.
        self._published: Counter[tuple[str, str]] = Counter()
        pending.add(self)
        self._runtime.start_renewal(self._lease)

    def draw_root(self, task: str, task_id: str) -> bytes:
        """Returns the root of the next message that it publishes under this task id.

        It is the same each time that the continuation is sent, so that the messages are copies.
        """
        self._published[task, task_id] += 1
        _, root, _ = self._delivery
        message = (root, task, task_id, self._published[task, task_id])
        return digest(b"continuation" + canonical(message), ROOT_BYTES)

    def sent(self) -> None:
        """Marks in Redis that everything was sent."""
        try:
            self._stop()
            run_sync(self._runtime.execute(commands.mark_continued(*self._delivery)))
        except IdempotencyError as error:
            report(table.MAY_CONTINUE_AGAIN, self._call, error=error)

    def end(self) -> None:
        """Lets another delivery send the continuation, unless it was sent."""
        if self not in pending:
            return
        try:
            self._stop()
            run_sync(self._runtime.execute(commands.stop_sending(*self._delivery)))
        except IdempotencyError as error:
            report(table.NOT_CONTINUED, self._call, error=error)

    def _stop(self) -> None:
        pending.discard(self)
        self._runtime.stop_renewal(self._lease)

    def _lost(self, raw: bytes) -> None:
        report(table.CONTINUATION_LOST, self._call)


#: The continuations that this process has to send.
pending: set[Continuation] = set()


def start(call: ActiveCall) -> None:
    """Gives `call` the right to send its continuation, and renews the lease from now on."""
    call.continuation = Continuation(call)
