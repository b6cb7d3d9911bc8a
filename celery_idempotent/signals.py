"""Celery signals that tell what became of each pass through the gate.

Connect to them as to Celery's own: ``sender`` is the task, every other argument comes by keyword.
Each signal has ``task_id`` (str) and ``key`` (str, as in :attr:`Record.key`); what it has besides
stands beside it. Handlers run where the task runs; an error in one is logged, never raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from celery.utils.dispatch import Signal

PREFIX: Final = "idempotency_"

#: An execution begins. ``token`` (int), ``attempt`` (int, 1 for the first).
begun = Signal(name="idempotency_begun", providing_args={"task_id", "key", "token", "attempt"})

#: It begins over the lease of one that died (sent after ``begun``). ``token``, ``attempt``,
#: ``idle`` (float, seconds from the end of that lease to this beginning).
taken_over = Signal(
    name="idempotency_taken_over", providing_args={"task_id", "key", "token", "attempt", "idle"}
)

#: Its result is stored. ``token``, ``attempt``.
completed = Signal(
    name="idempotency_completed", providing_args={"task_id", "key", "token", "attempt"}
)

#: Its error is stored and ends the key. ``token``, ``attempt``, ``error`` (the exception).
failed = Signal(
    name="idempotency_failed", providing_args={"task_id", "key", "token", "attempt", "error"}
)

#: Its key is free again. ``token``, ``attempt``, ``error`` (what the task raised),
#: ``held_for`` (seconds that the key stays reserved for a retry of the same task id, or None).
released = Signal(
    name="idempotency_released",
    providing_args={"task_id", "key", "token", "attempt", "error", "held_for"},
)

#: A duplicate is answered from the record. ``record`` (:class:`Record`).
replayed = Signal(name="idempotency_replayed", providing_args={"task_id", "key", "record"})

#: A duplicate meets a running execution. ``record``, ``policy`` (what happens to the duplicate).
conflicted = Signal(
    name="idempotency_conflicted", providing_args={"task_id", "key", "record", "policy"}
)

#: The execution has lost its lease. ``token``, ``attempt``.
lease_lost = Signal(
    name="idempotency_lease_lost", providing_args={"task_id", "key", "token", "attempt"}
)

#: The task is done and its outcome could not be stored: a duplicate may run again.
#: ``token``, ``attempt``, ``error``.
outcome_unsaved = Signal(
    name="idempotency_outcome_unsaved",
    providing_args={"task_id", "key", "token", "attempt", "error"},
)

#: Redis could not be asked for permission. ``error``, ``policy`` (what happens to the message).
store_unavailable = Signal(
    name="idempotency_store_unavailable", providing_args={"task_id", "key", "error", "policy"}
)


#: Redis has answered a begin, whatever it said. ``case`` (str, as in lua/begin.lua), ``seconds``
#: (float, there and back).
begin_replied = Signal(
    name="idempotency_begin_replied", providing_args={"task_id", "key", "case", "seconds"}
)

#: What becomes of a call: counted in every worker.
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

#: Told of each signal and its sender, whether anybody listens or not. In a worker: its tally.
counter: Callable[[Signal, Any], None] | None = None


def send(signal: Signal, sender: Any, **details: Any) -> None:
    """Send `signal`; costs next to nothing while nobody listens."""
    if heard(signal, sender):
        signal.send(sender=sender, **details)


def heard(signal: Signal, sender: Any) -> bool:
    """Count `signal`; whether anybody listens, and it is to be sent."""
    if counter is not None:
        counter(signal, sender)
    return bool(signal.receivers)
