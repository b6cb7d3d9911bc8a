"""Celery signals for everything that happens to a call of an idempotent task.

Connect to them as to Celery's own: ``sender`` is the task, every other argument is passed by
keyword. Each signal has ``task_id`` (str) and ``key`` (str, as :attr:`Record.key`); the comment
on each lists what it has besides. Receivers run where the task runs; their errors are logged, never
raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from celery.utils.dispatch import Signal

PREFIX: Final = "idempotency_"


def _signal(name: str, *arguments: str) -> Signal:
    return Signal(name=PREFIX + name, providing_args={"task_id", "key", *arguments})


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

#: Redis was unavailable at a begin. ``error``, ``policy`` (what happens to the message).
store_unavailable = _signal("store_unavailable", "error", "policy")

#: Redis has replied to a begin. ``case`` (str, as in lua/begin.lua), ``seconds`` (float, of the
#: round trip).
begin_replied = _signal("begin_replied", "case", "seconds")

#: A person has forgotten a record, by the command line or the dashboard; sent in that process.
#: ``user`` (str). ``sender`` is None if the app has no such task; ``task_id`` is empty if the
#: record could not be read.
forgotten = _signal("forgotten", "user")

#: Every outcome of a call: counted in each worker.
ALL: Final = (
    begun,
    taken_over,
    completed,
    failed,
    released,
    replayed,
    conflicted,
    lease_lost,
    outcome_unsaved,
    store_unavailable,
)

#: Called with each signal and its sender, even if the signal has no receivers. Workers set it.
counter: Callable[[Signal, Any], None] | None = None


def send(signal: Signal, sender: Any, **details: Any) -> None:
    """Counts `signal`, and sends it if it has receivers."""
    if counter is not None:
        counter(signal, sender)
    if signal.receivers:
        signal.send(sender=sender, **details)
