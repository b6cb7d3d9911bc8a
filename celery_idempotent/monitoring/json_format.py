"""Records as JSON documents. The names of the fields are a promise: see docs/operations.md."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from kombu.utils.encoding import safe_repr

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.record.record import Record, State
from celery_idempotent.store.record_query import RecordView


def of_view(record_view: RecordView) -> dict[str, Any]:
    """A record as a list shows it; one that cannot be read has the state ``CORRUPT``."""
    if record_view.record is None:
        return {"key": str(record_view.key), "task": record_view.key.task, "state": "CORRUPT"}
    return of_record(record_view.record)


def of_record(record: Record) -> dict[str, Any]:
    """Everything but the outcome. Times are ISO 8601 in UTC."""
    return {
        "key": record.key,
        "task": record.task,
        "state": record.state.value,
        "task_id": record.task_id,
        "worker": record.worker,
        "token": record.token,
        "attempt": record.attempt,
        "started_at": _moment(record.started_at),
        "finished_at": _moment(record.finished_at),
        "deadline": _moment(record.deadline),
        "expires_at": _moment(record.expires_at),
    }


def of_outcome(record: Record) -> dict[str, Any]:
    """``result``, or ``error`` with its type and message; or ``not_stored`` with the reason."""
    if not record.state.finished:
        return {}
    try:
        outcome = record.result
    except IdempotencyError as error:
        return {"not_stored": str(error)}
    if record.state is State.FAILED:
        return {"error": {"type": type(outcome).__name__, "message": _message(outcome)}}
    return {"result": outcome if _fits(outcome) else safe_repr(outcome)}


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        # It was read back without what it makes its text of.
        shown: str = safe_repr(error)
        return shown


def _fits(value: Any) -> bool:
    """Whether JSON can tell it: it has no infinity, and only text for keys."""
    try:
        json.dumps(value, allow_nan=False, default=str)
    except Exception:
        return False
    return True


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
