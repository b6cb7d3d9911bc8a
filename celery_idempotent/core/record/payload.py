"""The encoded form of a result, an error or the value of a step."""

from __future__ import annotations

from typing import NamedTuple

#: Begins the format of a value that is stored outside Redis, or is encrypted.
OFFLOADED, ENCRYPTED = "@", "!"

#: The fields that hold a payload: in a record, a row (its outbox) or a message.
RESULT, ERROR, OUTBOX, MESSAGE = "result", "error", "outbox", "message"
ARGUMENTS = "arguments"


class Payload(NamedTuple):
    """An encoded value, as a record stores it."""

    #: Serializer and compression, as in payload/codec.py; empty if no value is stored.
    format: str
    #: The value, the name of an offloaded object, or the reason why no value is stored.
    body: bytes

    @property
    def is_encrypted(self) -> bool:
        """Whether the body is encrypted, and so written by a process that has the keys."""
        return self.format.removeprefix(OFFLOADED).startswith(ENCRYPTED)

    def to_bytes(self) -> bytes:
        """Returns format and body in one value."""
        return self.format.encode() + b"\n" + self.body

    @classmethod
    def from_bytes(cls, data: bytes) -> Payload:
        """Returns the payload that :meth:`to_bytes` wrote."""
        form, _, body = data.partition(b"\n")
        return cls(form.decode(errors="replace"), body)


def step_field(name: str) -> str:
    """Returns the field that holds the value of a step."""
    return f"step {name!r}"


def message_field(task_id: str) -> str:
    """Returns the field that holds the message which is kept for a task id."""
    return f"{MESSAGE} {task_id!r}"


def subject(key: str, field: str) -> str:
    """Returns the subject of a sentence about a missing value."""
    kind = field.partition(" ")[0]
    verb = {RESULT: "completed", ERROR: "failed", MESSAGE: "ended"}.get(kind)
    if verb is None:
        return f"{field} of {key} has completed, but its value"
    return f"{key} has {verb}, but its {kind}"
