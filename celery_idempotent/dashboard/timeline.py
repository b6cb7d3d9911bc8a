"""The history of a record, as far as the record itself shows it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from celery_idempotent.monitoring import formatting
from celery_idempotent.record.record import Record, State
from celery_idempotent.store.inspection.record_query import RecordView


class Event(NamedTuple):
    """Something that has happened, or will."""

    #: Class of its mark: done, running, bad or later.
    mark: str
    title: str
    at: datetime | None = None
    detail: str = ""


def timeline(view: RecordView, steps: list[str]) -> list[Event]:
    """Returns the events of a record, the oldest first."""
    record = view.record
    if record is None:
        return []
    events = list(_deaths(record))
    if record.state is State.RESERVED:
        events.append(_reservation(record, view.now))
    elif record.started_at is not None:
        takes_over = record.attempt > 1
        detail = f"attempt {record.attempt}, on {record.worker}" if record.worker else ""
        title = "Taken over by another execution" if takes_over else "Execution began"
        events.append(Event("done", title, record.started_at, detail))
    events += [Event("done", f"Step {name} finished") for name in steps]
    if record.state is State.STARTED and record.deadline is not None:
        events.append(_lease(record.deadline, view.now, record.ended_by))
    elif record.state is State.COMPLETED:
        events.append(Event("done", "Result stored", record.finished_at, _duration(record)))
    elif record.state is State.FAILED:
        events.append(Event("bad", "Error stored", record.finished_at, _duration(record)))
    if record.expires_at is not None:
        events.append(Event("later", "Redis forgets the record", record.expires_at))
    return events


def _deaths(record: Record) -> list[Event]:
    if record.attempt <= 1:
        return []
    died = formatting.plural(record.attempt - 1, "earlier execution")
    return [Event("bad", f"{died} died", None, _orphaned(record))]


def _orphaned(record: Record) -> str:
    # A takeover stores the milliseconds between the end of the lease and itself.
    if record.state is State.STARTED and record.format.isdigit():
        seconds = int(record.format) / 1000
        return f"no execution held the key for {formatting.duration(seconds)}"
    return ""


def _reservation(record: Record, now: datetime) -> Event:
    assert record.deadline is not None
    title = f"Reserved for task {record.task_id}"
    if record.deadline <= now:
        return Event("bad", f"{title}; the reservation has expired", record.deadline)
    return Event("running", title, record.deadline, "until then, other calls are in conflict")


def _lease(deadline: datetime, now: datetime, ended_by: str | None) -> Event:
    if deadline <= now:
        why = (ended_by or "its process is dead or frozen").replace("_", " ")
        detail = f"{why}; the next delivery takes over"
        return Event("bad", "Lease expired", deadline, detail)
    return Event("running", "Running; the lease ends", deadline, "unless the heartbeat extends it")


def _duration(record: Record) -> str:
    if record.started_at is None or record.finished_at is None:
        return ""
    # The end is stored in milliseconds, the start in microseconds.
    seconds = max(timedelta(), record.finished_at - record.started_at).total_seconds()
    return f"after {formatting.duration(seconds)}"
