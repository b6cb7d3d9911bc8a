"""Conflicts: how a duplicate ends while another call holds the key.

`POLICIES` has a row for each value of ``idempotency_on_conflict``, whose names only `settings` has
besides. The flow calls `apply_policy`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from logging import INFO
from typing import NamedTuple

from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report, report_refused
from celery_idempotent.core.events.table import Event
from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.values import Answer, Drop, End, Failure, PutBack, Reject
from celery_idempotent.core.printable import one_line
from celery_idempotent.core.record import Record, State
from celery_idempotent.errors import ConflictError, KeyReusedError

#: Seconds of delay of a message that is put back for the first time.
FIRST_DELAY = 1.0
#: The longest delay in seconds of a message that nothing wakes, while another call has the key.
LONGEST_DELAY = 5.0


def wait(call: Call, record: Record, reason: ConflictError, now_ms: int | None = None) -> PutBack:
    """Puts `call` back until `record` has ended.

    Args:
        now_ms: the server's time, if the call is to come back when the lease expires, at the
            latest.
    """
    longest = min(call.settings.lease, LONGEST_DELAY)
    if now_ms is not None:
        left = (record.at_ms - now_ms) / 1000
        # The key is reserved for this very message, which is no retry: it is debounced, and its
        # quiet time has not ended.
        is_copy = record.task_id == call.task_id
        if is_copy and record.state is State.RESERVED and not record.awaited:
            quiet = error(f"{call.key} waits until no publish has come for a while", record)
            return PutBack(max(left, 0), quiet, call.data.rollback_count, record)
        longest = min(max(left, FIRST_DELAY), call.settings.lease)
    end = put_back(call, reason, longest)._replace(record=record)
    # The outcome of a finished record can still be missing: it is the result of another task, which
    # has not ended. Its end does not change the record, so nothing would wake the call.
    if record.state.finished:
        return end
    return end._replace(fallback=min(_jittered(call.settings.lease), _half_retention(call)))


class Policy(NamedTuple):
    """A value of ``idempotency_on_conflict``."""

    #: What happens to the duplicate, for ``explain``.
    sentence: str
    #: Whether functions, blocks and batches may have it. Every task may.
    functions: bool = False
    #: Whether consumers of kombu may have it.
    consumers: bool = False
    #: Whether the duplicate runs or gets the outcome later. A task is put back until then; a
    #: function waits until its ``wait_timeout`` is over.
    waits: bool = False
    #: Whether a newer call takes the key, so that only a copy of the running message is a
    #: duplicate.
    replaces: bool = False
    #: Returns the end of the duplicate, given its call, the record that has the key, and the error
    #: that describes the conflict.
    end: Callable[[Call, Record, ConflictError], End] = wait
    #: What is reported before that end.
    event: Event = Event()


POLICIES = {
    "retry": Policy("it waits until that ends", waits=True, consumers=True),
    "wait": Policy("it waits until that ends", waits=True, functions=True),
    "raise": Policy(
        "it fails with ConflictError",
        functions=True,
        end=lambda call, record, reason: Answer(Failure(reason), record, refused=True),
        event=Event(INFO, "raises ConflictError: {reason}"),
    ),
    "ignore": Policy(
        "it is ignored",
        consumers=True,
        end=lambda call, record, reason: Drop(record),
        event=Event(INFO, "is ignored as a duplicate: {reason}"),
    ),
    "reject": Policy(
        "it is rejected, and the broker dead-letters it",
        consumers=True,
        end=lambda call, record, reason: Reject(str(reason), record),
        event=Event(INFO, "is rejected as a duplicate: {reason}"),
    ),
    "replace": Policy("it takes over, and the outcome of that task is refused", replaces=True),
}


#: What became of a duplicate, by the letter of its end (:mod:`.values`), which its reference
#: stores: a word for programs, and a phrase for people, which precedes "task …".
BECAME = {
    "r": ("replayed", "got the outcome of"),
    "i": ("ignored", "was ignored, because of"),
    "c": ("conflict", "failed with ConflictError, because of"),
    "d": ("dead-lettered", "was rejected and dead-lettered, because of"),
    "o": ("other arguments", "failed with KeyReusedError: other arguments than"),
    "w": ("waiting", "was put back until the end of"),
}


def apply_policy(
    call: Call,
    record: Record,
    *,
    puts_back: bool = False,
    now_ms: int | None = None,
) -> End:
    """Applies ``on_conflict`` to the duplicate `call`, and returns its end.

    A copy of the running message is put back under every policy. It has the same task id, so a
    state of its own would overwrite that of the running one. And a broker may take its
    acknowledgement for that of both, which would lose the task if the running one dies.

    Args:
        puts_back: put this call back under every policy too: it has begun before, or waits for its
            turn, and publishers rely on its coming back.
        now_ms: the server's time. With it, such a call comes back when the lease expires, at the
            latest, because the worker of the execution may be dead.
    """
    policy = policy_for(call, record, puts_back=puts_back)
    report(table.CONFLICTED, call, record=record, policy=policy)
    reason, row = held(call, record), POLICIES[policy]
    if puts_back or record.task_id == call.task_id:
        return wait(call, record, reason, now_ms)
    report(row.event, call, reason=reason)
    return row.end(call, record, reason)


def policy_for(call: Call, record: Record, *, puts_back: bool = False) -> str:
    """Returns the policy for `call` while `record` has its key."""
    is_copy = record.task_id == call.task_id
    return "retry" if is_copy or puts_back else call.settings.on_conflict


def reused(record: Record, difference: Callable[[bytes], str]) -> KeyReusedError:
    """Returns the error of a call whose key was used with other arguments.

    Args:
        difference: as :meth:`.call.Host.difference`.
    """
    text = f"{record.key} belongs to task {record.task_id}, which was called with other arguments"
    differs = difference(record.fingerprint)
    return KeyReusedError(one_line(f"{text}: {differs}" if differs else text))


def refuse_reused(call: Call, record: Record) -> Answer:
    """Refuses `call`, whose key was used with other arguments."""
    refusal = report_refused(call, reused(record, call.host.difference))
    return Answer(Failure(refusal), record, refused=True, became="o")


def held(call: Call, record: Record) -> ConflictError:
    """Returns the error of a call whose key another one holds."""
    where = f" on {record.worker}" if record.worker else ", which has not begun yet"
    if record.task_id == call.task_id:
        return error(f"{call.key} is held by another copy of this message{where}", record)
    return error(f"{call.key} is held by task {record.task_id}{where}", record)


def error(text: str, record: Record) -> ConflictError:
    """Returns the error of a call while `record` has its key."""
    return ConflictError(one_line(text), record.task_id)


def put_back(call: Call, reason: BaseException, longest: float | None = None) -> PutBack:
    """Puts `call` back, with a delay that grows each time.

    Args:
        longest: the maximum of the delay in seconds; by default the lease. The delay is never more
            than half of the time for which an outcome is kept, so that the call still finds that.
    """
    data, settings = call.data, call.settings
    seconds = put_back_delay(data.put_back_count, longest or settings.lease)
    return PutBack(min(seconds, _half_retention(call)), reason, data.rollback_count)


def _half_retention(call: Call) -> float:
    """Returns half of the seconds for which the outcome that a call waits for is kept.

    Infinite for a key that may run again: its calls wait for their turn, not for an outcome.
    """
    kept_ms = min(call.settings.result_ms, call.settings.error_ms)
    return float("inf") if call.settings.runs_again else kept_ms / 2000


def put_back_delay(put_back_count: int, longest: float) -> float:
    """Returns the seconds until the next delivery: 1, doubled each time, up to `longest`.

    Random jitter subtracts up to a quarter, which spreads the duplicates of a burst.
    """
    delay: float = min(FIRST_DELAY * 2 ** min(put_back_count, 30), max(longest, FIRST_DELAY))
    return _jittered(delay)


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.75, 1.0)
