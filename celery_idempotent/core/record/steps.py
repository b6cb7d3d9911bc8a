"""Finished steps of an execution, stored one after another in the body of its record.

The newest arguments of a message (``extensions.newest``) are stored as a step without a name.

Each entry: length of the rest (4 bytes), length of the name (2) and the name, length of the format
(1) and the format, the value. If a name occurs twice, the later entry wins.
"""

from __future__ import annotations

from celery_idempotent.errors import CorruptRecordError

_MAX_NAME = 1000
#: The name of the entry with the newest arguments of a message; `write` refuses it for a step.
NEWEST_ARGUMENTS = ""


def write(name: str, form: str, value: bytes) -> bytes:
    """Returns the entry of one step.

    Raises:
        ValueError: if the name is empty or longer than 1000 bytes.
    """
    if not 0 < len(name.encode()) <= _MAX_NAME:
        raise ValueError(f"the name of a step must have 1 to {_MAX_NAME} bytes")
    return _write(name, form, value)


def write_arguments(form: str, value: bytes) -> bytes:
    """Returns the entry of the newest arguments."""
    return _write(NEWEST_ARGUMENTS, form, value)


def _write(name: str, form: str, value: bytes) -> bytes:
    encoded_name, encoded_form = name.encode(), form.encode("ascii")
    name_field = len(encoded_name).to_bytes(2, "big") + encoded_name
    rest = name_field + bytes([len(encoded_form)]) + encoded_form + value
    return len(rest).to_bytes(4, "big") + rest


def read(body: bytes, key: str) -> dict[str, tuple[str, bytes]]:
    """Returns the format and value of each step in `body`, by name.

    Raises:
        CorruptRecordError: if `body` is truncated.
    """
    steps = {}
    position = 0
    try:
        while position < len(body):
            entry, position = read_field(body, position, 4)
            name, form_start = read_field(entry, 0, 2)
            form, value_start = read_field(entry, form_start, 1)
            steps[name.decode()] = form.decode("ascii"), entry[value_start:]
    except (IndexError, ValueError):
        raise corrupt("steps", key) from None
    return steps


def read_field(data: bytes, position: int, length_bytes: int) -> tuple[bytes, int]:
    """Returns the length-prefixed field at `position`, and the position of the next one.

    Raises:
        IndexError: if `data` is truncated.
    """
    start = position + length_bytes
    end = start + int.from_bytes(data[position:start], "big")
    if end > len(data):
        raise IndexError(end)
    return data[start:end], end


def corrupt(part: str, key: str) -> CorruptRecordError:
    """Returns the error for a truncated part of a record."""
    return CorruptRecordError(f"the {part} of {key} cannot be read: forget the key to start afresh")
