"""Gives reservations back from the worker's main process, until Redis has accepted it.

A message that ends without having begun may have reserved its key when it was published: it was
revoked, has expired, cannot be read, ran while Redis was unavailable, or was refused. Unless its
reservation ends, later publishes of the key would not be published.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from celery.signals import task_unknown

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.events.report import log_extra
from celery_idempotent.core.key import Key
from celery_idempotent.core.printable import one_line
from celery_idempotent.core.record import State
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.task.message.message_headers import MessageHeaders
from celery_idempotent.errors import IdempotencyError, StoreUnavailableError

logger = logging.getLogger(__name__)

#: Seconds before the next attempt while Redis is unavailable.
RETRY_AFTER = 1.0


class _Jobs:
    """A thread that repeats each job until Redis replies; the first job starts it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], object]]] = queue.SimpleQueue()
        #: The process that has the thread: a forked child must start its own.
        self._pid = 0

    def add(self, task_id: str, job: Callable[[], object]) -> None:
        """Lets the thread run `job`, which is about the message `task_id`."""
        if self._pid != os.getpid():
            self._jobs, self._pid = queue.SimpleQueue(), os.getpid()
            name = "idempotency-reservations"
            threading.Thread(target=self._run, name=name, daemon=True).start()
        self._jobs.put((task_id, job))

    def _run(self) -> None:
        while True:
            task_id, job = self._jobs.get()
            extra = log_extra(None, task_id=task_id)
            while True:
                try:
                    job()
                except StoreUnavailableError as error:
                    message = "The reservation of task %s is given back later: %s"
                    logger.debug(message, one_line(task_id), error, extra=extra)
                    threading.Event().wait(RETRY_AFTER)
                    continue
                except Exception as error:
                    message = "Cannot give the reservation of task %s back; it will expire: %s"
                    logger.warning(message, one_line(task_id), error, extra=extra)
                break


_jobs = _Jobs()


def give_back(store: RecordStore, key: Key, task_id: str, generation: int | None = None) -> None:
    """Ends the reservation of a message, soon and in another thread.

    Args:
        key: of the message's record.
        generation: given for a message that will never run: the reservation of a retry, if it is
            for this message or an earlier one, is ended too.
    """

    def job() -> None:
        run_sync(store.execute(commands.give_back(key, task_id)))
        if generation is None or (stored := run_sync(store.read(key))) is None:
            return
        record = store.record(key, stored.raw)
        is_its = record.state is State.RESERVED and record.task_id == task_id
        if is_its and 0 < record.awaited <= generation:
            run_sync(store.execute(commands.forget(key, record)))

    _jobs.add(task_id, job)


@task_unknown.connect(weak=False)
def give_back_unknown(sender: Any, message: Any, **_: Any) -> None:
    """Ends the reservation of a message whose task this worker does not know."""
    headers = message.headers or {}
    task, task_id = headers.get("task"), headers.get("id")
    try:
        key = MessageHeaders.read(str(task), str(task_id), headers).key
    except IdempotencyError:
        return
    if key is not None:
        for store in app_tasks.stores(app_tasks.enabled(sender.app)):
            give_back(store, key, str(task_id))
