"""Finished steps of an execution, stored one after another in the body of its record.

Each entry: length of the rest (4 bytes), length of the name (2) and the name, length of the format
(1) and the format, the value. If a name occurs twice, the later entry counts.

Errors that ended one task id, but not the key, precede the steps. They have no name: length of the
rest (4), length of the name (2: zero), F or G (like the letter of a record), the message's
generation (7), time (6), length of the task id (2) and the task id, length of the format (1) and
the format, the error. Only the scripts write them: lua/prelude.lua. In the record of a turn, an
entry of the same form with W is the message that waits, until the time, with its fingerprint in the
place of the format.
"""

from __future__ import annotations

from celery_idempotent.errors import CorruptRecordError

_MAX_NAME = 1000
#: The letter of an entry that is no error: the message that waits for the turn of a key.
_WAITING = b"W"


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
            if name:
                form, value_start = _field(entry, form_start, 1)
                steps[name.decode()] = form.decode("ascii"), entry[value_start:]
    except (IndexError, ValueError):
        raise _corrupt("steps", key) from None
    return steps


def errors(body: bytes, key: str) -> list[tuple[str, bytes]]:
    """Returns the format and bytes of each error of an ended task id in `body`.

    Raises:
        CorruptRecordError: if `body` is cut short.
    """
    return [(form, error) for _, form, error in _errors(body, key)]


def ended_task_ids(body: bytes, key: str) -> list[bytes]:
    """Returns the task ids that the errors in `body` ended, as `layout.write_task_id` encodes them.

    Raises:
        CorruptRecordError: if `body` is cut short.
    """
    return [task_id for task_id, _, _ in _errors(body, key)]


def waiting(body: bytes, key: str) -> tuple[bytes, int] | None:
    """Returns the task id of the message that waits, as it is encoded, and until when; or None.

    Raises:
        CorruptRecordError: if `body` is cut short.
    """
    if body[6:7] != _WAITING or not _is_error(body, 0):
        return None
    try:
        entry, _ = _field(body, 0, 4)
        task_id, _ = _field(entry, 16, 2)
    except (IndexError, ValueError):
        raise _corrupt("turn", key) from None
    return task_id, int.from_bytes(entry[10:16], "big")


def without_errors(body: bytes) -> bytes:
    """Returns the steps in `body`."""
    position = 0
    while _is_error(body, position):
        position += 4 + int.from_bytes(body[position : position + 4], "big")
    return body[position:]


def _errors(body: bytes, key: str) -> list[tuple[bytes, str, bytes]]:
    """Returns the task id, format and bytes of each error in `body`."""
    errors = []
    position = 0
    try:
        while _is_error(body, position):
            entry, position = _field(body, position, 4)
            if entry[2:3] == _WAITING:
                continue
            task_id, form_start = _field(entry, 16, 2)
            form, error_start = _field(entry, form_start, 1)
            encoding, _, _traceparent = form.decode("ascii").partition(" ")
            errors.append((task_id, encoding, entry[error_start:]))
    except (IndexError, ValueError):
        raise _corrupt("errors", key) from None
    return errors


def _field(data: bytes, position: int, length_bytes: int) -> tuple[bytes, int]:
    """Returns the field at `position`, which starts with its length, and where the next one is."""
    start = position + length_bytes
    end = start + int.from_bytes(data[position:start], "big")
    if end > len(data):
        raise IndexError(end)
    return data[start:end], end


def _is_error(body: bytes, position: int) -> bool:
    """Whether the entry at `position` has no name."""
    return body[position + 4 : position + 6] == b"\0\0"


def _corrupt(part: str, key: str) -> CorruptRecordError:
    return CorruptRecordError(f"the {part} of {key} cannot be read: forget the key to start afresh")
