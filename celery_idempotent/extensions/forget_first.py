"""Rerun messages: the worker forgets the key's outcome before the message begins.

The process that publishes the message forgets nothing. The record stays as it is until the message
arrives, so a message that is lost on its way can be published again, and a process that dies in
between leaves nothing half done. The message names the token of the outcome: of several messages
for one outcome, only the first forgets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from celery_idempotent.errors import CorruptRecordError, StoreUnavailableError
from celery_idempotent.events import table
from celery_idempotent.events.report import decide, report
from celery_idempotent.flow import conflict
from celery_idempotent.flow.active_call import ActiveCall
from celery_idempotent.flow.end import End
from celery_idempotent.flow.executor import Executor
from celery_idempotent.flow.extension import Extension
from celery_idempotent.flow.soft_limit import at_row
from celery_idempotent.record.record import Record
from celery_idempotent.sql.database import Database
from celery_idempotent.store import commands
from celery_idempotent.store.run_sync import run_sync


class ForgetFirst(Extension):
    """Forgets the outcome with `token` before the first begin; for blocking code.

    Args:
        executor: the task's executor.
        step_rows_in: returns the databases that may have rows of steps.
    """

    def __init__(
        self,
        token: int,
        executor: Executor,
        step_rows_in: Callable[[], Iterable[Database]],
        call: ActiveCall,
    ) -> None:
        super().__init__(call)
        self._token, self._executor, self._step_rows_in = token, executor, step_rows_in

    async def before_begin(self) -> End | None:
        """Forgets the outcome; any other outcome stays, and the begin replays it."""
        try:
            forgotten = at_row(self._forget)
        except StoreUnavailableError as error:
            decide(table.STORE_UNAVAILABLE, self.call)
            return conflict.requeue(self.call, error)
        except CorruptRecordError:
            return None  # the begin refuses it
        if forgotten:
            report(table.RUNS_AGAIN, self.call)
        return None

    def _forget(self) -> bool:
        executor, key = self._executor, self.call.key
        database: Database | None = self.call.settings.transaction
        record = run_sync(executor.store.get(key))
        row = database.find(executor.store.config.prefix, key) if database is not None else None
        shown: Record | str = commands.NO_RECORD
        if record is not None:
            if record.token != self._token or not record.state.finished:
                return False
            shown = record
        elif row is None or row.token != self._token:
            return False
        owner = row.owner if row is not None else ""
        forget = partial(executor.forget, key, shown, database, owner)
        return forget(step_rows_in=self._step_rows_in()) == "ok"
