"""The history of a record, as the record itself shows it."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from celery_idempotent.monitoring import formatting
from celery_idempotent.record import layout
from celery_idempotent.record.record import Record, State
from celery_idempotent.store.inspection.record_reader import RecordView


class Event(NamedTuple):
    """A past or future event."""

    #: CSS class of its mark: done, running, bad or later.
    mark: str
    title: str
    at: datetime | None = None
    detail: str = ""


def timeline(view: RecordView, steps: list[str]) -> list[Event]:
    """Returns the events of a record, oldest first."""
    record = view.record
    if record is None:
        return []
    deaths = formatting.deaths(record)
    events = [Event("bad", deaths, None, _orphaned(record))] if deaths else []
    is_poisoned = layout.is_poisoned(record)
    if record.state is State.RESERVED:
        events.append(_reservation(record, view.is_past_deadline))
    elif record.started_at is not None:
        takes_over = record.attempt > 1 and not is_poisoned
        detail = f"attempt {record.attempt}, on {record.worker}" if record.worker else ""
        title = "Taken over by another execution" if takes_over else "Execution began"
        title = "The last of them began" if is_poisoned else title
        events.append(Event("done", title, record.started_at, detail))
    events += [Event("done", f"Step {name} finished") for name in steps]
    if record.state is State.STARTED:
        events.append(_lease(record, view.is_past_deadline))
    elif record.state.finished:
        mark, what = ("bad", "Error") if record.state is State.FAILED else ("done", "Result")
        run_time = formatting.run_time(record)
        detail = f"after {run_time}" if run_time else ""
        events.append(Event(mark, f"{what} stored", record.finished_at, detail))
    if record.expires_at is not None:
        events.append(Event("later", "Redis forgets the record", record.expires_at))
    return events


def _orphaned(record: Record) -> str:
    # A takeover stores the milliseconds since the lease ended.
    if record.state is State.STARTED and record.format.isdigit():
        seconds = int(record.format) / 1000
        return f"no execution held the key for {formatting.duration(seconds)}"
    return ""


def _reservation(record: Record, is_expired: bool) -> Event:
    title = f"Reserved for task {record.task_id}"
    if is_expired:
        return Event("bad", f"{title}; the reservation has expired", record.deadline)
    return Event("running", title, record.deadline, "until then, other calls are in conflict")


def _lease(record: Record, is_expired: bool) -> Event:
    if is_expired:
        why = (record.ended_by or "its process is dead or frozen").replace("_", " ")
        detail = f"{why}; the next delivery takes over"
        return Event("bad", "Lease expired", record.deadline, detail)
    detail = "unless the heartbeat extends it"
    return Event("running", "Running; the lease ends", record.deadline, detail)
