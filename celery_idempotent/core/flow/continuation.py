"""The continuation of a call that has returned a value.

It is callbacks, the rest of a chain, or a chord's count. Celery's tracer sends it after the flow of
the call has ended. Until it is marked as sent, or its time is over, no redelivery sends it. If the
process dies, its parent ends that time.
"""

from __future__ import annotations

from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report
from celery_idempotent.core.flow.active_call import ActiveCall
from celery_idempotent.core.store import commands
from celery_idempotent.core.store.run_sync import run_sync
from celery_idempotent.errors import IdempotencyError


class Continuation:
    """The right of one delivery to send the continuation of its call; for code that blocks.

    Args:
        token: of the execution that has returned the value.
    """

    def __init__(self, call: ActiveCall, token: int) -> None:
        self._call, self._token = call, token

    def sent(self) -> None:
        """Marks in Redis that everything was sent."""
        call = self._call
        try:
            run_sync(call.runtime.execute(commands.mark_sent(call.key, self._token)))
        except IdempotencyError as error:
            report(table.MAY_CONTINUE_AGAIN, call, error=error)
