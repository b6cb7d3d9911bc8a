"""What a duplicate does while another call holds the key: ``idempotency_on_conflict``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NoReturn

from celery_idempotent.errors import ConflictError, KeyReusedError
from celery_idempotent.events import table
from celery_idempotent.events.report import report
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.printable import one_line
from celery_idempotent.record.record import Record

#: Seconds before a message is requeued for the first time.
FIRST_REQUEUE_DELAY = 1.0


def refuse(call: ExecutorCall, record: Record, *, returns: bool = False) -> NoReturn:
    """Requeues, ignores or rejects the duplicate `call`, or raises ConflictError, by its policy.

    A copy of the message that runs is requeued under every policy. It has the same task id, so a
    state of its own would overwrite the running one's, and a broker may take its acknowledgement
    for both, which loses the task if the running one dies.

    Args:
        returns: requeue it under every policy. It has begun before, or waits for its turn, and
            publishers rely on that.
    """
    call.blocked(record)
    policy = policy_for(call, record, returns=returns)
    report(table.CONFLICTED, call, record=record, policy=policy)
    _POLICIES[policy](call, record)


def policy_for(call: ExecutorCall, record: Record, *, returns: bool = False) -> str:
    """What happens to `call` while `record` is held."""
    is_copy = record.task_id == call.task_id
    return "retry" if is_copy or returns else call.settings.on_conflict


def reused(record: Record) -> KeyReusedError:
    """The error of a call whose key has a record of other arguments."""
    return KeyReusedError(
        one_line(
            f"{record.key} belongs to task {record.task_id}, which was called with other arguments"
        )
    )


def held(call: ExecutorCall, record: Record) -> ConflictError:
    """The error of a call whose key another one holds."""
    where = f" on {record.worker}" if record.worker else ", which has not begun yet"
    return ConflictError(one_line(f"{call.key} is held by task {record.task_id}{where}"))


def requeue(call: ExecutorCall, unanswered_ids: bytes, reason: BaseException) -> NoReturn:
    """Requeues `call`, with a delay that grows each time."""
    delay = requeue_delay(call.requeue_count, call.settings.lease)
    call.requeue(delay, unanswered_ids, reason)


def requeue_delay(requeue_count: int, longest: float) -> float:
    """Seconds until the message is delivered again: 1, doubled each time, up to `longest`.

    Random jitter takes up to a quarter off, which spreads the duplicates of a burst.
    """
    delay: float = min(
        FIRST_REQUEUE_DELAY * 2 ** min(requeue_count, 30), max(longest, FIRST_REQUEUE_DELAY)
    )
    return delay * random.uniform(0.75, 1.0)


def _requeue(call: ExecutorCall, record: Record) -> NoReturn:
    requeue(call, call.unanswered_ids, held(call, record))


def _raise(call: ExecutorCall, record: Record) -> NoReturn:
    error = held(call, record)
    report(table.RAISES_CONFLICT, call, reason=error)
    raise error


def _ignore(call: ExecutorCall, record: Record) -> NoReturn:
    report(table.IGNORED, call, reason=held(call, record))
    call.ignore()


def _reject(call: ExecutorCall, record: Record) -> NoReturn:
    error = held(call, record)
    report(table.REJECTED, call, reason=error)
    call.reject(str(error))


#: ``wait`` is refused when its time is up, and is then requeued like ``retry``.
_POLICIES: dict[str, Callable[[ExecutorCall, Record], NoReturn]] = {
    "retry": _requeue,
    "wait": _requeue,
    "raise": _raise,
    "ignore": _ignore,
    "reject": _reject,
}
