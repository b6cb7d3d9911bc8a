"""A rerun: a message that forgets the outcome of its key before it begins, and so runs again.

An operator publishes it (`core.task.publish.kept_message`). `TaskHost` adds this extension to it.
"""

from __future__ import annotations

from functools import partial
from logging import INFO
from typing import Any

from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report
from celery_idempotent.core.events.table import Event
from celery_idempotent.core.flow import conflict
from celery_idempotent.core.flow.extension import Extension
from celery_idempotent.core.flow.forget import forget_call
from celery_idempotent.core.flow.values import End
from celery_idempotent.core.record import Record
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.errors import CorruptRecordError, StoreUnavailableError
from celery_idempotent.sql import database_of

RUNS_AGAIN = Event(INFO, "has been run again: the outcome of its key is forgotten")


class ForgetFirst(Extension):
    """Forgets an outcome before the first begin; for messages of tasks."""

    async def before_begin(self) -> End | None:
        """Forgets the outcome that the message names; the begin replays any other."""
        try:
            forgotten = self._forget()
        except StoreUnavailableError as error:
            report(table.STORE_UNAVAILABLE, self.call)
            return conflict.put_back(self.call, error)
        except CorruptRecordError:
            return None  # the begin refuses it
        if forgotten:
            report(RUNS_AGAIN, self.call)
        return None

    def _forget(self) -> bool:
        """Forgets the outcome that the message replaces; returns whether it did.

        That is the outcome with the token in the message's headers, in Redis or in the database.
        """
        host: Any = self.call.host
        forgets = host.headers.forgets
        configuration, key = self.call.sender.idempotency_configuration, self.call.key
        executor, database = configuration.executor, database_of(self.call.sender)
        record = run_sync(executor.store.get(key))
        row = database.find(executor.store.config.prefix, key) if database is not None else None
        shown: Record | str = commands.NO_RECORD
        if record is not None:
            if record.token != forgets or not record.state.finished:
                return False
            shown = record
        elif row is None or row.token != forgets:
            return False
        forget = partial(forget_call, executor, key, shown)
        if database is None:
            return bool(forget() == "ok")
        owner = row.owner if row is not None else ""
        return bool(database.forget(executor.store.config.prefix, key, forget, owner) == "ok")
