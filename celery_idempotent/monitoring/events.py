"""Celery events, so that Flower and ``celery events`` show what became of a duplicate.

Sent by the process that runs the task, as long as somebody wants task events of this worker
(``-E``, ``celery control enable_events``, Flower). In a monitor the name of the event becomes the
task's state until Celery's own events tell how it ended.
"""

from __future__ import annotations

import logging
from typing import Any

from celery_idempotent import shared_counters, signals
from celery_idempotent.record.record import Record

logger = logging.getLogger(__name__)


def connect() -> None:
    """Send events from now on, if they are wanted."""
    signals.replayed.connect(_replayed, weak=False)
    signals.conflicted.connect(_conflicted, weak=False)
    signals.taken_over.connect(_taken_over, weak=False)


def _replayed(sender: Any, key: str, record: Record, **_: Any) -> None:
    _send(sender, "task-replayed", key=key, first_uuid=record.task_id)


def _conflicted(sender: Any, key: str, record: Record, policy: str, **_: Any) -> None:
    _send(sender, "task-conflicted", key=key, holder_uuid=record.task_id, policy=policy)


def _taken_over(sender: Any, key: str, attempt: int, **_: Any) -> None:
    _send(sender, "task-taken-over", key=key, attempt=attempt)


def _send(task: Any, name: str, **fields: Any) -> None:
    board = shared_counters.shared_counters
    if board is None or not board.events_wanted or not getattr(task, "send_events", False):
        return
    try:
        # Once: whoever waits for the task must not wait for a monitor's sake.
        task.send_event(name, retry=False, **fields)
    except Exception as error:
        logger.debug("The event %s was not sent: %s", name, error)
