"""The result of a call that was not published, because another one has its key."""

from __future__ import annotations

import logging
from time import monotonic, sleep
from typing import Any

from celery.result import AsyncResult, assert_will_not_block
from celery.states import FAILURE, PENDING, READY_STATES, SUCCESS

from celery_idempotent.errors import NotReadyError, ResultNotStoredError, StoreUnavailableError
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import State
from celery_idempotent.store import commands

logger = logging.getLogger(__name__)

#: Milliseconds in which a worker that has completed the record stores its result in the backend.
BACKEND_DELAY_MS = 2000
#: Seconds between two reads of the result backend while an execution holds the record.
LONGEST_INTERVAL = 1.0


class RecordResult(AsyncResult):
    """Answers from the result backend or, where that has no result, from the key's record.

    Whoever holds the key may never store a result under its id: an item of ``map``, ``apply()`` in
    another process, a call with ``ignore_result``; or the result has expired before the record.
    """

    #: The result backend, which waits for many results at once, knows nothing of records.
    supports_native_join = False

    def __init__(
        self, task_id: str, key: Key, backend: Any = None, app: Any = None, parent: Any = None
    ) -> None:
        super().__init__(task_id, backend, app=app, parent=parent)
        self.key = key
        self._store = self.app.tasks[key.task].idempotency_configuration.executor.store
        #: The record, as it was last read, while it can still change.
        self._unfinished: bytes | None = None

    def __reduce_args__(self) -> tuple[Any, ...]:
        return self.id, self.key, self.backend, None, self.parent

    def __copy__(self) -> RecordResult:
        return type(self)(self.id, self.key, self.backend, self.app, self.parent)

    def get(
        self,
        timeout: float | None = None,
        propagate: bool = True,
        interval: float = 0.5,
        *args: Any,
        disable_sync_subtasks: bool = True,
        on_interval: Any = None,
        **options: Any,
    ) -> Any:
        """As Celery's, but does not wait for the result backend alone."""
        if disable_sync_subtasks:
            assert_will_not_block()
        give_up_at = None if timeout is None else monotonic() + timeout
        while not self.ready():
            left = LONGEST_INTERVAL if give_up_at is None else give_up_at - monotonic()
            if left <= 0:
                raise self.TimeoutError("The operation timed out.")
            if self._unfinished is None:
                sleep(min(left, interval))
            else:
                self._store.wait_for_change(self.key, self._unfinished, min(left, LONGEST_INTERVAL))
            if on_interval:
                on_interval()
        return super().get(
            timeout, propagate, interval, *args, disable_sync_subtasks=False, **options
        )

    def _get_task_meta(self) -> Any:
        """What `state`, `result`, `ready` and everything else of an AsyncResult goes by."""
        return self._cache or self._maybe_set_cache(self._read())

    def _read(self) -> dict[str, Any]:
        trouble = None
        try:
            meta: dict[str, Any] = self.backend.get_task_meta(self.id)
        except Exception as error:
            trouble, meta = error, {"status": PENDING, "result": None}
        if meta["status"] in READY_STATES:
            return meta
        try:
            outcome = self._outcome(in_backend_soon=trouble is None)
        except StoreUnavailableError as error:
            logger.warning("%s: no result in the backend, and %s", self.id, error)
            outcome = None
        if outcome is None and self._unfinished is None and trouble is not None:
            raise trouble
        return outcome or meta

    def _outcome(self, *, in_backend_soon: bool) -> dict[str, Any] | None:
        """What the record says, in the words of a result backend; None while it has no outcome."""
        self._unfinished = None
        answer = self._store.execute(commands.get(self.key))
        record = self._store.looked_up(self.key, answer)
        if record is None:
            return None
        if not record.state.finished:
            self._unfinished = answer.raw.partition(b" ")[2]
            return None
        try:
            value = record.outcome()
            state = SUCCESS if record.state is State.COMPLETED else FAILURE
        except (NotReadyError, StoreUnavailableError):
            return None  # it is told elsewhere: by the task that took its place, or by the depot
        except Exception as error:
            young = answer.now_ms - record.at_ms < BACKEND_DELAY_MS
            if isinstance(error, ResultNotStoredError) and in_backend_soon and young:
                return None
            state, value = FAILURE, error
        return {"status": state, "result": value, "traceback": None, "children": None}
