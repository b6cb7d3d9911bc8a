"""Converts records to JSON documents with stable fields: see docs/reference/command-line.md."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from kombu.utils.encoding import safe_repr

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import Record, State
from celery_idempotent.store.inspection.record_reader import RecordView


def view_fields(view: RecordView) -> dict[str, Any]:
    """Returns the fields of a record; the state of an unreadable one is ``CORRUPT``.

    If it was found by a duplicate's task id, ``duplicate`` describes what that met.
    """
    key = view.key
    fields = key_fields(key, view.state) if view.record is None else record_fields(view.record)
    return fields if view.reference is None else fields | {"duplicate": view.reference._asdict()}


def key_fields(key: Key, state: str) -> dict[str, Any]:
    """Returns the fields of a key whose record is absent or unreadable."""
    return {"key": str(key), "explicit": key.explicit, "task": key.task, "state": state}


_FIELDS = (
    *("key", "label", "explicit", "task", "state", "task_id", "worker", "token", "attempt"),
    *("started_at", "finished_at", "deadline", "ended_by", "expires_at"),
)


def record_fields(record: Record) -> dict[str, Any]:
    """Returns all fields except the outcome. Times are ISO 8601 in UTC."""
    values = ((name, getattr(record, name)) for name in _FIELDS)
    return {
        name: value.isoformat() if isinstance(value, datetime) else value for name, value in values
    } | {"state": record.state.value}


def outcome_fields(record: Record | None) -> dict[str, Any]:
    """Returns ``result``, ``error`` with type and message, or ``not_stored`` with the reason."""
    if record is None or not record.state.finished:
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
    """Whether strict JSON with ``default=str`` accepts `value`: no NaN, no tuple as key."""
    try:
        json.dumps(value, allow_nan=False, default=str)
    except Exception:
        return False
    return True
