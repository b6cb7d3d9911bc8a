"""The fields of a record that hold a payload: its result, its error and its steps."""

from __future__ import annotations

RESULT, ERROR = "result", "error"


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
