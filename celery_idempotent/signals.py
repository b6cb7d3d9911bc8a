"""Celery signals for everything that happens to a call of an idempotent task, and what is counted.

Connect to them as to Celery's own: ``sender`` is the task, every other argument is passed by
keyword. Each signal has ``task_id`` (str), ``key`` (str, as :attr:`Record.key`) and ``label`` (str,
empty without ``idempotency_label``); the comment on each lists what it has besides. Receivers run
where the task runs; their errors are logged, never raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from celery.utils.dispatch import Signal

PREFIX: Final = "idempotency_"


def _signal(name: str, *arguments: str) -> Signal:
    return Signal(name=PREFIX + name, providing_args={"task_id", "key", "label", *arguments})


#: An execution begins. ``token`` (int), ``attempt`` (int, 1 for the first).
begun = _signal("begun", "token", "attempt")

#: The execution takes over an expired lease (sent after ``begun``). ``token``, ``attempt``,
#: ``orphaned_seconds`` (float, from the end of that lease to this begin).
taken_over = _signal("taken_over", "token", "attempt", "orphaned_seconds")

#: Its result is stored. ``token``, ``attempt``.
completed = _signal("completed", "token", "attempt")

#: Its error is stored and ends the key. ``token``, ``attempt``, ``error`` (the exception).
failed = _signal("failed", "token", "attempt", "error")

#: Its key is released. ``token``, ``attempt``, ``error`` (what the task raised),
#: ``reserved_seconds`` (for which the key stays reserved for a retry of the task id, or None).
released = _signal("released", "token", "attempt", "error", "reserved_seconds")

#: A duplicate gets the recorded outcome. ``record`` (:class:`Record`).
replayed = _signal("replayed", "record")

#: A duplicate finds its key held by another execution. ``record``, ``policy`` (what happens to the
#: duplicate).
conflicted = _signal("conflicted", "record", "policy")

#: The execution has lost its lease. ``token``, ``attempt``.
lease_lost = _signal("lease_lost", "token", "attempt")

#: The task has run and its outcome could not be stored: a duplicate may run again.
#: ``token``, ``attempt``, ``error``.
outcome_unsaved = _signal("outcome_unsaved", "token", "attempt", "error")

#: A call cannot run and has no outcome either: its rule, its task or its record has to be mended.
#: ``reason`` (str, one of `REASONS`), ``error`` (the exception that the call raises), ``at``
#: (``"begin"``, or ``"publish"`` if `apply_async` raises it). ``key`` is empty if there is none.
refused = _signal("refused", "reason", "error", "at")

#: A call is not published, because another one has its key (``idempotency_dedupe_publish``).
#: ``record``: of that call. Sent by the publisher; ``task_id`` is the one that is not used.
deduplicated = _signal("deduplicated", "record")

#: The task has completed, or failed for good, and its outcome has no value: duplicates will get
#: ResultNotStoredError. ``token``, ``attempt``, ``reason`` (str).
not_stored = _signal("not_stored", "token", "attempt", "reason")

#: Redis was unavailable at a begin. ``error``, ``policy`` (what happens to the message).
store_unavailable = _signal("store_unavailable", "error", "policy")

#: Redis has replied to a begin. ``case`` (str, as in lua/begin.lua), ``seconds`` (float, of the
#: round trip).
begin_replied = _signal("begin_replied", "case", "seconds")

#: A person has forgotten a record, by the command line or the dashboard; sent in that process.
#: ``user`` (str). ``sender`` is None if the app has no such task; ``task_id`` is empty if the
#: record could not be read.
forgotten = _signal("forgotten", "user")

#: A call in shadow begins, or is refused a key and runs all the same. ``decision`` (str, one of
#: `SHADOW`); ``record`` (without a result, else None) with ``would_replay``, ``would_wait`` and
#: ``would_conflict``; ``policy`` (else None) with ``would_conflict``; ``reason`` and ``error``, as
#: of `refused` (else None), with ``would_refuse``. Not sent while Redis is unavailable.
shadowed = _signal("shadowed", "decision", "record", "policy", "reason", "error")

#: Decisions about calls in shadow. Without ``idempotency_shadow`` the call would have run; taken
#: over an expired lease; run after the execution that holds its key (``idempotency_until`` is
#: ``finished`` or ``started``); got the outcome of another call; found its key held; failed; not
#: been published (``idempotency_dedupe_publish``).
SHADOW: Final = (
    "would_run",
    "would_take_over",
    "would_wait",
    "would_replay",
    "would_conflict",
    "would_refuse",
    "would_deduplicate",
)

#: What can be decided about a call. Each pass of a call through the executor (a delivery of its
#: message, an item of ``map``, a call of a function) has exactly one decision, unless its process
#: dies before it: ``run`` (its body begins), ``takeover`` (its body begins, after an execution that
#: died), ``replay``, ``conflict``, ``refused``, ``store_unavailable`` (it has to come again),
#: ``unprotected`` (its body begins without a record, as Redis is unavailable), ``interrupted`` (a
#: soft time limit, a shutdown, a cancellation or an unexpected error came first), or one of
#: `SHADOW`.
DECISIONS: Final = (
    "run",
    "takeover",
    "replay",
    "conflict",
    "refused",
    "store_unavailable",
    "unprotected",
    "interrupted",
    *SHADOW,
)

#: How executions end. One that ends may have several of these.
OUTCOMES: Final = (
    "completed",
    "failed",
    "released",
    "lease_lost",
    "outcome_unsaved",
    "not_stored",
)

#: Why calls are refused. ``invalid``: the arguments do not fit the signature, or the task's id does
#: not fit into a record.
REASONS: Final = (
    "key_rule",
    "invalid",
    "reused",
    "poisoned",
    "corrupt",
    "not_stored",
    "store_unavailable",
)

#: Before a reason: the name under which refusals for it are counted, at a begin or at a publish.
REFUSED: Final = "refused_"
#: Before a reason: the name under which calls in shadow that would be refused for it are counted.
WOULD_REFUSE: Final = "would_refuse_"

#: All names that are counted. ``deduplicated`` counts calls that were not published.
COUNTED: Final = (
    *(*DECISIONS, *OUTCOMES, "deduplicated"),
    *(REFUSED + reason for reason in REASONS),
    *(WOULD_REFUSE + reason for reason in REASONS),
)

#: Called with each counted name and the name of the task or function.
counters: list[Callable[[str, str], None]] = []


def count(name: str, task: str) -> None:
    """Counts `name`, one of `COUNTED`, for a task or function."""
    for counter in counters:
        counter(name, task)


def send(signal: Signal, sender: Any, **details: Any) -> None:
    """Sends `signal`, if it has receivers."""
    if signal.receivers:
        signal.send(sender=sender, **details)
