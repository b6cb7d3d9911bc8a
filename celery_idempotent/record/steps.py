"""Finished steps of an execution, stored one after another in the body of its record.

Each entry: length of the rest (4 bytes), length of the name (2) and the name, length of the format
(1) and the format, the value. If a name occurs twice, the later entry counts.

In the record of a turn, the body is one entry without a name, the message that waits: length of
the rest (4), length of the name (2: zero), W, zero (7), end of its reservation (6), length of the
task id (2) and the task id, length of the fingerprint (1) and the fingerprint. Only the scripts
write it: lua/prelude.lua.
"""

from __future__ import annotations

from celery_idempotent.errors import CorruptRecordError

_MAX_NAME = 1000
#: Where an entry has its name: the message that waits for the turn of a key.
_WAITING = b"\0\0W"


def write(name: str, form: str, value: bytes) -> bytes:
    """Returns the entry of one step.

    Raises:
        ValueError: if the name is empty or longer than 1000 bytes.
    """
    encoded_name, encoded_form = name.encode(), form.encode("ascii")
    if not 0 < len(encoded_name) <= _MAX_NAME:
        raise ValueError(f"the name of a step must have 1 to {_MAX_NAME} bytes")
    name_field = len(encoded_name).to_bytes(2, "big") + encoded_name
    rest = name_field + bytes([len(encoded_form)]) + encoded_form + value
    return len(rest).to_bytes(4, "big") + rest


def read(body: bytes, key: str) -> dict[str, tuple[str, bytes]]:
    """Returns the format and value of each step in `body`, by name.

    Raises:
        CorruptRecordError: if `body` is cut short.
    """
    steps = {}
    position = 0
    try:
        while position < len(body):
            entry, position = _field(body, position, 4)
            name, form_start = _field(entry, 0, 2)
            if name:  # else it is the message that waits for the turn
                form, value_start = _field(entry, form_start, 1)
                steps[name.decode()] = form.decode("ascii"), entry[value_start:]
    except (IndexError, ValueError):
        raise _corrupt("steps", key) from None
    return steps


def waiting(body: bytes, key: str) -> tuple[bytes, int] | None:
    """Returns the task id of the message that waits, as it is encoded, and until when; or None.

    Raises:
        CorruptRecordError: if `body` is cut short.
    """
    if body[4:7] != _WAITING:
        return None
    try:
        entry, _ = _field(body, 0, 4)
        task_id, _ = _field(entry, 16, 2)
    except (IndexError, ValueError):
        raise _corrupt("turn", key) from None
    return task_id, int.from_bytes(entry[10:16], "big")


def _field(data: bytes, position: int, length_bytes: int) -> tuple[bytes, int]:
    """Returns the field at `position`, which starts with its length, and where the next one is."""
    start = position + length_bytes
    end = start + int.from_bytes(data[position:start], "big")
    if end > len(data):
        raise IndexError(end)
    return data[start:end], end


def _corrupt(part: str, key: str) -> CorruptRecordError:
    return CorruptRecordError(f"the {part} of {key} cannot be read: forget the key to start afresh")
