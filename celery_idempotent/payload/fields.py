"""The fields that hold a payload: in a record, a row (its outbox) or a message."""

from __future__ import annotations

RESULT, ERROR, OUTBOX, MESSAGE = "result", "error", "outbox", "message"


def step_field(name: str) -> str:
    """Returns the field that holds the value of a step."""
    return f"step {name!r}"


def subject(key: str, field: str) -> str:
    """Returns the subject of a sentence about a missing value."""
    verb = {RESULT: "completed", ERROR: "failed", MESSAGE: "ended"}.get(field)
    if verb is None:
        return f"{field} of {key} has completed, but its value"
    return f"{key} has {verb}, but its {field}"
