"""What can happen to a call, with its log line, signal and counter.

Extensions have rows of their own.

A row's message continues the line "key: task id (attempt n) …", with fields as in `str.format`. A
normal run is DEBUG, since Celery logs that the task succeeded; INFO is for anything unusual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from logging import CRITICAL, DEBUG, ERROR, INFO, WARNING, Logger, getLogger
from operator import attrgetter, itemgetter
from string import Formatter
from typing import Any, Final

from celery.utils.dispatch import Signal

from celery_idempotent.errors import (
    CorruptRecordError,
    KeyReusedError,
    KeyRuleError,
    PoisonedTaskError,
    ReplacedError,
    ResultNotStoredError,
    StoreUnavailableError,
)

#: The beginning of each signal's name.
PREFIX: Final = "idempotency_"


@dataclass(eq=False)
class Event:
    """One row: what :func:`report.report` logs, sends and counts when this happens to a call."""

    #: Level of the log line; 0 for no line.
    level: int = 0
    #: Text of the log line.
    message: str = ""
    #: The signal to send.
    signal: Any = None
    _: KW_ONLY
    #: The decision about the call, unless it already has one. It is counted.
    decision: str = ""
    #: The counter to increment each time; its name may also have fields.
    counter: str = ""
    #: The logger of the line; None for the one of :func:`report.report`.
    logger: Logger | None = None

    def __post_init__(self) -> None:
        #: The message for `logging`, and the functions that return the values to merge into it.
        self.template = ""
        self._getters: list[Callable[[dict[str, Any]], Any]] = []
        for text, field, spec, conversion in Formatter().parse(self.message):
            self.template += text.replace("%", "%%")
            if field is not None:
                self.template += f"%{spec or 's'}"
                self._getters.append(_getter(field, is_repr=conversion == "r"))

    def values(self, fields: dict[str, Any]) -> list[Any]:
        """Returns the values to merge into the message."""
        return [get(fields) for get in self._getters]


def _getter(field: str, *, is_repr: bool) -> Callable[[dict[str, Any]], Any]:
    name, _, attribute = field.partition(".")
    if attribute:
        get = attrgetter(attribute)
        return lambda fields: get(fields[name])
    return (lambda fields: repr(fields[name])) if is_repr else itemgetter(name)


def _signal(name: str, *arguments: str) -> Signal:
    return Signal({"task_id", "key", "label", *arguments}, name=PREFIX + name)


def _outcome(name: str, level: int, message: str, *arguments: str) -> Event:
    """Returns the row of an end of an execution, which has a signal and a counter of this name."""
    return Event(level, message, _signal(name, "token", "attempt", *arguments), counter=name)


# Decisions without a line of their own.
RUN = Event(decision="run")
TAKEOVER = Event(decision="takeover")
CONFLICT = Event(decision="conflict")
STORE_UNAVAILABLE = Event(decision="store_unavailable")
INTERRUPTED = Event(decision="interrupted")

# Begin.
BEGUN = Event(DEBUG, "begins", _signal("begun", "token", "attempt"))
TAKEN_OVER = Event(
    INFO,
    "takes over from an execution that died",
    _signal("taken_over", "token", "attempt", "orphaned_seconds"),
)
BEGIN_REPLIED = Event(signal=_signal("begin_replied", "case", "seconds"))
BEGINS_AGAIN = Event(WARNING, "begins again: its lease expired before it ran")
REPLAYED = Event(
    INFO,
    "gets the outcome of task {record.task_id}",
    _signal("replayed", "record"),
    decision="replay",
)
CONFLICTED = Event(signal=_signal("conflicted", "record", "policy"), decision="conflict")
REPLACEMENT_FAILED = Event(
    INFO,
    "may run: the replacement of task {record.task_id} has failed ({error.__class__.__name__})",
)
RESULT_UNREADABLE = Event(DEBUG, "cannot read its earlier result: {error}")
RAISES = Event(INFO, "raises {reason.__class__.__name__}")
PUT_BACK = Event(INFO, "is put back for {seconds:.1f} s{unless}: {reason}")
#: `PUT_BACK` while Redis is unavailable. At DEBUG, since `CANNOT_BEGIN_YET` has one line for many.
PUT_BACK_IN_OUTAGE = Event(DEBUG, PUT_BACK.message)
RETURNED = Event(
    WARNING,
    "is returned to the broker, since it cannot be published again ({error}): {reason}",
)
#: At DEBUG, because the error is raised: Celery logs it with its traceback.
REFUSED = Event(
    DEBUG,
    "is refused ({reason}): {error}",
    _signal("refused", "reason", "error", "at"),
    decision="refused",
    counter="refused_{reason}",
)
CANNOT_BEGIN = Event(ERROR, "cannot begin: {error}")
CANNOT_BEGIN_YET = Event(WARNING, "cannot begin yet: {error}{like_it}")
BEGIN_FAILED = Event(signal=_signal("store_unavailable", "error", "policy"))
UNPROTECTED = Event(WARNING, "runs without protection: {error}", decision="unprotected")
OUTCOME_UNAVAILABLE = Event(ERROR, "cannot get its outcome: {error}")

# The end of an execution.
COMPLETED = _outcome("completed", DEBUG, "ran; {end}")
FAILED = _outcome(
    "failed",
    INFO,
    "ran and raised {error.__class__.__name__}; its duplicates will get {outcome}",
    "error",
)
RELEASED = _outcome("released", INFO, "{end}; its key {key_is}", "error", "reserved_seconds")
NOT_STORED = _outcome(
    "not_stored",
    ERROR,
    "{end}; its outcome is not stored, and its duplicates will get ResultNotStoredError: {reason}",
    "reason",
)
OUTCOME_UNSAVED = _outcome(
    "outcome_unsaved",
    CRITICAL,
    "ran; its outcome is not stored, so a duplicate may run again: {error}",
    "error",
)
LEASE_LOST = _outcome("lease_lost", WARNING, "has lost its lease; its outcome will be refused")
RECORD_GONE = Event(
    WARNING,
    "has lost its record, which Redis has evicted or deleted{evictions}; its outcome is not stored",
    LEASE_LOST.signal,
    counter="lease_lost",
)
REPLACED = Event(INFO, "{error}", LEASE_LOST.signal, counter="lease_lost")
ENDED_BY_WORKER = Event(INFO, "is ended by its worker, which is about to kill this process")
ENDED_LATE = Event(WARNING, "ran to its end before {error.__class__.__name__} was raised")
NOT_RELEASED = Event(WARNING, "cannot release its key, whose lease will expire: {error}")

# Executions whose outcome is committed by a transaction.
COMMITTED_ONLY = Event(
    WARNING, "ran; its outcome is committed, and its record follows with the next call: {error}"
)

# Publishing, continuations, the main process, people.
BYPASSED = Event(
    ERROR,
    "has succeeded without a decision: its body has run unprotected, outside the task's __call__, "
    "because of the worker's pool or of another library; further ones are only counted",
    counter="bypassed",
)
BYPASSED_AGAIN = Event(counter="bypassed")
ABANDONED = Event(INFO, "is ended ({reason}); its key is free in {grace:.1f} s")
DEDUPLICATED = Event(
    INFO,
    "is not published: task {record.task_id} has its key",
    _signal("deduplicated", "record"),
    counter="deduplicated",
)
PUBLISH_REFUSED = Event(DEBUG, REFUSED.message, REFUSED.signal, counter="refused_{reason}")
NOT_RESERVED = Event(WARNING, "is published without a reservation: {error}")
RESERVATION_KEPT = Event(WARNING, "keeps its reservation, which will expire: {error}")
MAY_CONTINUE_AGAIN = Event(WARNING, "may send its continuation again: {error}")
_audit = getLogger("celery_idempotent.audit")
FORGOTTEN = Event(
    INFO, "is forgotten by {user!r} ({state})", _signal("forgotten", "user"), logger=_audit
)
RERUN = Event(INFO, "is run again by {user!r} ({what})", _signal("rerun", "user"), logger=_audit)

# Shadow: what would have happened to a call that runs. The decisions share a signal.
_shadowed = _signal("shadowed", "decision", "record", "policy", "reason", "error")


def _would(decision: str, message: str = "", counter: str = "") -> Event:
    text = message and f"runs in shadow; it would have {message}"
    return Event(INFO if text else 0, text, _shadowed, decision=decision, counter=counter)


WOULD_RUN = _would("would_run")
WOULD_TAKE_OVER = _would("would_take_over", "taken over from an execution that died")
WOULD_WAIT = _would("would_wait", "run after task {record.task_id}, which holds the key")
WOULD_REPLAY = _would("would_replay", "been a replay of task {record.task_id}")
WOULD_CONFLICT = _would(
    "would_conflict", "met a conflict ({policy}): task {record.task_id} holds the key"
)
WOULD_REFUSE = _would("would_refuse", "failed: {error}", counter="would_refuse_{reason}")
WOULD_DEDUPLICATE = _would("would_deduplicate")
PUBLISHED_IN_SHADOW = Event(
    INFO,
    "is published in shadow; it would not have been, because of task {record.task_id}",
)
PUBLISHED_UNCOUNTED = Event(DEBUG, "is published; shadow counting failed: {error}")

#: Decisions about calls in shadow. Without shadow, the call would (in this order) have run; taken
#: over an expired lease; run after the execution that holds its key, if a key may run again;
#: received the outcome of another call; met a conflict; failed; not been published.
SHADOW: Final = tuple(
    event.decision
    for event in (
        *(WOULD_RUN, WOULD_TAKE_OVER, WOULD_WAIT, WOULD_REPLAY),
        *(WOULD_CONFLICT, WOULD_REFUSE, WOULD_DEDUPLICATE),
    )
)

#: What can be decided about a call. Each pass of a call through the flow (a delivery of its
#: message, a call of a function) has exactly one decision, unless its process dies first: ``run``
#: (its body begins), ``takeover`` (its body begins, after an execution that died), ``replay``,
#: ``conflict``, ``refused``, ``store_unavailable`` (it must be retried), ``unprotected`` (its body
#: begins without a record, as Redis is unavailable), ``interrupted`` (a shutdown, cancellation or
#: unexpected error came first), or one of `SHADOW`.
DECISIONS: Final = (
    *("run", "takeover", "replay", "conflict", "refused"),
    *("store_unavailable", "unprotected", "interrupted"),
    *SHADOW,
)

#: How executions end. One execution may have several of these.
OUTCOMES: Final = (
    *("completed", "failed", "released", "lease_lost", "outcome_unsaved", "not_stored"),
)

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (KeyRuleError, "key_rule"),
    (KeyReusedError, "reused"),
    (PoisonedTaskError, "poisoned"),
    (ReplacedError, "replaced"),
    (CorruptRecordError, "corrupt"),
    (ResultNotStoredError, "not_stored"),
    (StoreUnavailableError, "store_unavailable"),
    (Exception, "invalid"),
)
#: Why calls are refused. ``invalid``: the arguments do not fit the signature, the task id does not
#: fit into a record, an option of the message is invalid, or the transaction cannot begin.
REASONS: Final = tuple(reason for _, reason in _REASONS)


def reason_of(error: Exception) -> str:
    """Returns the one of `REASONS` for which a call with `error` is refused."""
    return next(reason for kind, reason in _REASONS if isinstance(error, kind))


#: Prefix of the counters of refusals, at a begin or at a publish; a reason follows it.
REFUSED_FOR: Final = "refused_"
#: Prefix of the counters of calls in shadow that would be refused; a reason follows it.
WOULD_REFUSE_FOR: Final = "would_refuse_"

#: How soon after the end of an execution a call that was put back during it gets the outcome.
ANSWERED: Final = ("answered_within_100ms", "answered_within_1s", "answered_later")
WAIT_ENDED = Event(counter="{answered}")


def answered(milliseconds: int) -> str:
    """Returns the one of `ANSWERED` for an answer so long after the end."""
    return ANSWERED[(milliseconds > 100) + (milliseconds > 1000)]


#: All names that are counted. ``deduplicated`` counts calls that were not published, ``bypassed``
#: messages that have succeeded without a decision.
COUNTED: Final = (
    *(*DECISIONS, *OUTCOMES, *ANSWERED, "deduplicated", "bypassed"),
    *(REFUSED_FOR + reason for reason in REASONS),
    *(WOULD_REFUSE_FOR + reason for reason in REASONS),
)
