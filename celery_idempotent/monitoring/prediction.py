"""What a call would meet if it were published now."""

from __future__ import annotations

from typing import NamedTuple

from celery_idempotent.key.key import Key
from celery_idempotent.record.record import Record, State
from celery_idempotent.settings import Settings
from celery_idempotent.store.record_query import RecordView


class Prediction(NamedTuple):
    """A case, and a sentence on it."""

    #: ungated, run, taken over, poisoned, replay, reused, conflict or corrupt.
    case: str
    sentence: str


_CONFLICTS = {
    "retry": "come back later",
    "wait": "wait in the worker, then come back later",
    "raise": "fail with ConflictError",
    "ignore": "be ignored",
    "reject": "go to the broker's dead letters",
}


def predict(key: Key, settings: Settings, record_view: RecordView | None) -> Prediction:
    """What a call with `key` meets; the scripts decide, this tells beforehand what they will."""
    if not settings.enabled:
        return Prediction("ungated", "it runs ungated: idempotency_enabled is off")
    if record_view is None:
        return Prediction("run", "nothing: it runs")
    record = record_view.record
    if record is None:
        return Prediction(
            "corrupt", "CorruptRecordError: what is there cannot be read; forget the key"
        )
    if key.fingerprint and record.fingerprint and key.fingerprint != record.fingerprint:
        return Prediction(
            "reused", f"KeyReusedError: task {record.task_id} came with other arguments"
        )
    if record.state.finished:
        what = "result" if record.state is State.COMPLETED else "error"
        return Prediction("replay", f"the {what} of task {record.task_id}, again")
    if record.deadline is not None and record.deadline > record_view.now:
        return _conflict(settings, record)
    if record.state is State.RESERVED:
        return Prediction("run", "a reservation that has ended: it runs")
    if record.attempt >= settings.max_attempts:
        return Prediction("poisoned", f"PoisonedTaskError: {record.attempt} executions have died")
    return Prediction("taken over", f"task {record.task_id}, which died: it takes over and runs")


def _conflict(settings: Settings, record: Record) -> Prediction:
    holder = f"task {record.task_id}"
    holder += f", which runs on {record.worker}" if record.worker else ", which is yet to run"
    if settings.dedupe_publish:
        return Prediction(
            "conflict", f"{holder}: nothing is published, and its result is the result"
        )
    return Prediction("conflict", f"{holder}: it will {_CONFLICTS[settings.on_conflict]}")
