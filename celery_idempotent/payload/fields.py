"""The fields that hold a payload: of a record its result, error and steps; of a row its outbox."""

from __future__ import annotations

RESULT, ERROR, OUTBOX = "result", "error", "outbox"


def step_field(name: str) -> str:
    """Returns the field that holds the value of a step."""
    return f"step {name!r}"


def subject(key: str, field: str) -> str:
    """Returns the subject of a sentence about a value that is missing."""
    if field == RESULT:
        return f"{key} has completed, but its result"
    if field == ERROR:
        return f"{key} has failed, but its error"
    return f"{field} of {key} has completed, but its value"
