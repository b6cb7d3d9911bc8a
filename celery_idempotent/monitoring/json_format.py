"""Converts records to JSON documents. Field names are stable: see docs/operations.md."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from kombu.utils.encoding import safe_repr

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.record.record import Record, State
from celery_idempotent.store.inspection.record_query import RecordView


def view_fields(view: RecordView) -> dict[str, Any]:
    """Returns the fields of a record; the state of an unreadable one is ``CORRUPT``.

    A record that was found by the task id of a duplicate has ``duplicate``: what that met.
    """
    duplicate = {} if view.reference is None else {"duplicate": view.reference._asdict()}
    if view.record is not None:
        return record_fields(view.record) | duplicate
    key = view.key
    return {
        "key": str(key),
        "explicit": key.explicit,
        "task": key.task,
        "state": "CORRUPT",
        **duplicate,
    }


def record_fields(record: Record) -> dict[str, Any]:
    """Returns all fields but the outcome. Times are ISO 8601 in UTC."""
    return {
        "key": record.key,
        "label": record.label,
        "explicit": record.explicit,
        "task": record.task,
        "state": record.state.value,
        "task_id": record.task_id,
        "worker": record.worker,
        "token": record.token,
        "attempt": record.attempt,
        "started_at": _iso(record.started_at),
        "finished_at": _iso(record.finished_at),
        "deadline": _iso(record.deadline),
        "ended_by": record.ended_by,
        "expires_at": _iso(record.expires_at),
    }


def outcome_fields(record: Record) -> dict[str, Any]:
    """Returns ``result``; or ``error`` with type and message; or ``not_stored`` with the reason."""
    if not record.state.finished:
        return {}
    try:
        outcome = record.result
    except IdempotencyError as error:
        return {"not_stored": str(error)}
    if record.state is State.FAILED:
        return {"error": {"type": type(outcome).__name__, "message": _message(outcome)}}
    return {"result": outcome if _is_serializable(outcome) else safe_repr(outcome)}


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        # A decoded exception may lack the attributes that its __str__ needs.
        text: str = safe_repr(error)
        return text


def _is_serializable(value: Any) -> bool:
    """Whether strict JSON can represent `value`, which excludes NaN and keys that are not text."""
    try:
        json.dumps(value, allow_nan=False, default=str)
    except Exception:
        return False
    return True


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
