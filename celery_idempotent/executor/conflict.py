"""What a duplicate does while the first one runs, by ``idempotency_on_conflict``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NoReturn

from celery_idempotent import signals
from celery_idempotent.errors import ConflictError, KeyReusedError
from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.record.record import Record

FIRST_REQUEUE_DELAY = 1.0


def refuse(call: ExecutorCall, record: Record) -> NoReturn:
    """Send the duplicate `call` where the policy says.

    A copy of the very message that runs is always put back first: it bears the same task id, so
    any state of its own would overwrite the running one's, and the broker may count its
    acknowledgement for both, which loses the task if the running one dies.
    """
    copy = record.task_id == call.task_id
    policy = "retry" if copy else call.settings.on_conflict
    signals.send(
        signals.conflicted,
        call.sender,
        task_id=call.task_id,
        key=str(call.key),
        record=record,
        policy=policy,
    )
    _POLICIES[policy](call, record)


def reused(record: Record) -> KeyReusedError:
    """The error for a call whose key came with other arguments before."""
    return KeyReusedError(
        f"{record.key} belongs to task {record.task_id}, which came with other arguments"
    )


def requeue(call: ExecutorCall, unanswered_ids: bytes, reason: BaseException) -> NoReturn:
    """Put `call` back for later, a little later each time."""
    call.requeue(requeue_delay(call.requeue_count, call.settings.lease), unanswered_ids, reason)


def requeue_delay(requeue_count: int, longest: float) -> float:
    """Seconds till a message comes back: 1, then twice that each time, up to `longest`.

    Up to a quarter less by chance, so that the duplicates of a burst do not come back as one.
    """
    delay: float = min(
        FIRST_REQUEUE_DELAY * 2 ** min(requeue_count, 30), max(longest, FIRST_REQUEUE_DELAY)
    )
    return delay * random.uniform(0.75, 1.0)


def _requeue(call: ExecutorCall, record: Record) -> NoReturn:
    requeue(call, call.unanswered_ids, held(call, record))


def _raise(call: ExecutorCall, record: Record) -> NoReturn:
    raise held(call, record)


def _ignore(call: ExecutorCall, record: Record) -> NoReturn:
    call.ignore()


def _reject(call: ExecutorCall, record: Record) -> NoReturn:
    call.reject(str(held(call, record)))


def held(call: ExecutorCall, record: Record) -> ConflictError:
    """The error for a call whose key someone else holds."""
    place = f" on {record.worker}" if record.worker else ", which is yet to run"
    return ConflictError(f"{call.key} is held by task {record.task_id}{place}")


#: ``wait`` has waited by now, and comes back like ``retry``.
_POLICIES: dict[str, Callable[[ExecutorCall, Record], NoReturn]] = {
    "retry": _requeue,
    "wait": _requeue,
    "raise": _raise,
    "ignore": _ignore,
    "reject": _reject,
}
