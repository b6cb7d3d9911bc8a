"""The execution that produced a result, and the results of calls that were not published."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import sleep
from typing import Any

from celery.result import AsyncResult, assert_will_not_block
from celery.states import FAILURE, PENDING, READY_STATES, SUCCESS

from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.events.report import log_extra
from celery_idempotent.core.key import Key
from celery_idempotent.core.printable import one_line
from celery_idempotent.core.record import State
from celery_idempotent.core.store import run_sync
from celery_idempotent.core.store.scan import key_of
from celery_idempotent.errors import NotReadyError, ResultNotStoredError, StoreUnavailableError

logger = logging.getLogger(__name__)

#: Milliseconds that a worker may take to store a result in the backend after `complete`.
BACKEND_DELAY_MS = 2000
#: Maximum seconds between two reads of the result backend.
LONGEST_INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The execution whose outcome a call received."""

    #: As `Record.key`.
    key: str
    #: Whether the call is a duplicate; otherwise the execution is its own.
    replayed: bool
    #: The task id of the execution, its fencing token, and the number of its attempt.
    task_id: str
    token: int
    attempt: int


def outcome_of(result: AsyncResult, key: Key | None = None) -> CallOutcome | None:
    """Returns the execution that produced the outcome of a call; None if it is not known.

    A duplicate is found by its task id, in one round trip for each Redis that the app's tasks use.
    An executed call leaves only its record, so its key is needed: pass it, or set
    ``result_extended``, which stores the arguments in the result backend. The execution is also
    unknown while the call has no outcome, after its record has expired, and if the outcome is an
    error that is not stored for the key.

    Args:
        result: from ``delay``, ``apply_async`` or ``AsyncResult(task_id)``.
        key: of the call, from `idempotency_key_of`.

    Raises:
        StoreUnavailableError, CorruptRecordError: if the record cannot be fetched, or read.
    """
    replayed = isinstance(result, RecordResult)
    if isinstance(result, RecordResult):
        key = result.key
    else:
        stores = app_tasks.stores(app_tasks.enabled(result.app))
        found = next(filter(None, (store.reference(result.id) for store in stores)), None)
        if found is not None and found.replayed:
            return CallOutcome(found.key, True, found.task_id, found.token, found.attempt)
        key = key or (found and key_of(found.key, "")) or _key_of_extended_result(result)
        task: Any = result.app.tasks.get(key.task) if key is not None else None
        if key is None or not hasattr(task, "idempotency_configuration"):
            return None
        key = task.idempotency_configuration.record_key(key, result.id)
    store = result.app.tasks[key.task].idempotency_configuration.executor.store
    record = run_sync(store.get(key))
    is_its = record is not None and (replayed or record.task_id == result.id)
    if record is None or not is_its or not record.state.finished:
        return None
    return CallOutcome(record.key, replayed, record.task_id, record.token, record.attempt)


def _key_of_extended_result(result: AsyncResult) -> Key | None:
    """Returns the key of the arguments that ``result_extended`` has stored; None without them."""
    try:
        key: Key = result.app.tasks[result.name].idempotency_key_of(*result.args, **result.kwargs)
        return key
    except Exception as error:
        logger.debug(
            "%s: the result backend does not have its arguments: %r", one_line(result.id), error
        )
        return None


class RecordResult(AsyncResult):
    """Reads the result backend and, if it has no result, the record of the key.

    Some calls with a key store no result under their id: an ``apply()`` in another process, a call
    with ``ignore_result``. A result may also expire before the record.
    """

    #: So that a `ResultSet` waits for each result by its `get`: Celery's native join reads many
    #: results of the backend at once, and no records.
    supports_native_join = False

    def __init__(
        self, task_id: str, key: Key, backend: Any = None, app: Any = None, parent: Any = None
    ) -> None:
        super().__init__(task_id, backend, app=app, parent=parent)
        self.key = key
        self._store = self.app.tasks[key.task].idempotency_configuration.executor.store
        #: The bytes of the record at the last read, if it was unfinished.
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
        """Waits for the outcome in the result backend or in the record, and returns it."""
        if disable_sync_subtasks:
            assert_will_not_block()
        deadline = None if timeout is None else monotonic() + timeout
        while not self.ready():
            left = LONGEST_INTERVAL if deadline is None else deadline - monotonic()
            if left <= 0:
                raise self.TimeoutError("The operation timed out.")
            if self._unfinished is None:
                sleep(min(left, interval))
            else:
                wait = min(left, LONGEST_INTERVAL)
                run_sync(self._store.wait_for_change(self.key, self._unfinished, wait))
            if on_interval:
                on_interval()
        return super().get(
            timeout, propagate, interval, *args, disable_sync_subtasks=False, **options
        )

    def _get_task_meta(self) -> Any:
        """Returns the meta of the task for `state`, `result`, `ready` and the rest."""
        return self._cache or self._maybe_set_cache(self._read())

    def _read(self) -> dict[str, Any]:
        backend_error = None
        try:
            meta: dict[str, Any] = self.backend.get_task_meta(self.id)
        except Exception as error:
            backend_error, meta = error, {"status": PENDING, "result": None}
        if meta["status"] in READY_STATES:
            return meta
        outcome = None
        try:
            outcome = self._outcome(backend_available=backend_error is None)
        except StoreUnavailableError as error:
            message = "%s: no result in the backend, and no reply from Redis: %s"
            extra = log_extra(self.key, task_id=self.id)
            logger.warning(message, one_line(self.id), error, extra=extra)
        if outcome is None and self._unfinished is None and backend_error is not None:
            raise backend_error
        return outcome or meta

    def _outcome(self, *, backend_available: bool) -> dict[str, Any] | None:
        """Returns the outcome in the record as task meta; None while there is none."""
        self._unfinished = None
        stored = run_sync(self._store.read(self.key))
        if stored is None:
            return None
        record = self._store.record(self.key, stored.raw, stored.expires_at)
        if not record.state.finished:
            self._unfinished = stored.raw
            return None
        try:
            value = record.outcome()
            state = SUCCESS if record.state is State.COMPLETED else FAILURE
        except (NotReadyError, StoreUnavailableError):
            return None  # its replacement has not ended, or the offload storage does not reply
        except Exception as error:
            recent = self._store.now_ms() - record.at_ms < BACKEND_DELAY_MS
            if isinstance(error, ResultNotStoredError) and backend_available and recent:
                return None  # the backend will have the result soon
            state, value = FAILURE, error
        return {"status": state, "result": value, "traceback": None, "children": None}
