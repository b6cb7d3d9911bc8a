"""Finished steps of an execution, in the body of its STARTED record, one behind the other.

Each entry: length of the rest (4 bytes), length of the name (2) and the name, length of the format
(1) and the format, the value. A later entry of the same name counts.

Before them stand errors that ended one task id and not the key, without a name: length of the rest
(4), length of the name (2: zero), F or G (as the letter of a record), the message's generation (7),
time (6), length of the task id (2) and the task id, length of the format (1) and the format, the
error. The scripts write them: lua/prelude.lua.
"""

from __future__ import annotations

from celery_idempotent.errors import CorruptRecordError

_MAX_NAME = 1000


def write(name: str, form: str, value: bytes) -> bytes:
    """The entry of one step.

    Raises:
        ValueError: if the name is empty or longer than 1000 bytes.
    """
    label, kind = name.encode(), form.encode("ascii")
    if not 0 < len(label) <= _MAX_NAME:
        raise ValueError(f"the name of a step must have 1 to {_MAX_NAME} bytes")
    rest = len(label).to_bytes(2, "big") + label + bytes([len(kind)]) + kind + value
    return len(rest).to_bytes(4, "big") + rest


def read(body: bytes, key: str) -> dict[str, tuple[str, bytes]]:
    """Format and value of each step in `body`, by name.

    Raises:
        CorruptRecordError: if `body` is cut short.
    """
    steps = {}
    position = 0
    try:
        while position < len(body):
            start = position + 4
            position = start + int.from_bytes(body[position:start], "big")
            if position > len(body):
                raise IndexError(position)
            name_end = start + 2 + int.from_bytes(body[start : start + 2], "big")
            if name_end == start + 2:
                continue
            form_end = name_end + 1 + body[name_end]
            if form_end > position:
                raise IndexError(form_end)
            name = body[start + 2 : name_end].decode()
            steps[name] = body[name_end + 1 : form_end].decode("ascii"), body[form_end:position]
    except (IndexError, ValueError):
        raise CorruptRecordError(
            f"the steps of {key} cannot be read; forget the key to start afresh"
        ) from None
    return steps


def errors(body: bytes, key: str) -> list[tuple[str, bytes]]:
    """Format and bytes of each error of an ended task id in `body`.

    Raises:
        CorruptRecordError: if `body` is cut short.
    """
    return [(form, error) for _, form, error in _errors(body, key)]


def ended_task_ids(body: bytes, key: str) -> list[bytes]:
    """The task ids, as `layout.write_task_id` has them, that the errors in `body` have ended.

    Raises:
        CorruptRecordError: if `body` is cut short.
    """
    return [task_id for task_id, _, _ in _errors(body, key)]


def without_errors(body: bytes) -> bytes:
    """The steps in `body`."""
    position = 0
    while body[position + 4 : position + 6] == b"\0\0":
        position += 4 + int.from_bytes(body[position : position + 4], "big")
    return body[position:]


def _errors(body: bytes, key: str) -> list[tuple[bytes, str, bytes]]:
    found = []
    position = 0
    try:
        while body[position + 4 : position + 6] == b"\0\0":
            start = position + 4
            position = start + int.from_bytes(body[start - 4 : start], "big")
            if position > len(body):
                raise IndexError(position)
            task_id = start + 16
            form = task_id + 2 + int.from_bytes(body[task_id : task_id + 2], "big")
            error = form + 1 + body[form]
            # Behind a space stands the trace that it comes from.
            kind, _, _ = body[form + 1 : error].decode("ascii").partition(" ")
            found.append((body[task_id + 2 : form], kind, body[error:position]))
    except (IndexError, ValueError):
        raise CorruptRecordError(
            f"the errors of {key} cannot be read; forget the key to start afresh"
        ) from None
    return found
