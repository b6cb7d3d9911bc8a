"""Formats records, times and sizes for people, and records for programs as JSON documents.

The fields of the documents are stable: see docs/reference/command-line.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from kombu.utils.encoding import safe_repr

from celery_idempotent.core.flow.conflict import BECAME
from celery_idempotent.core.key import Key
from celery_idempotent.core.printable import plural
from celery_idempotent.core.record import Record, State, layout, steps
from celery_idempotent.core.store.reference import Reference
from celery_idempotent.errors import IdempotencyError, KeyRuleError
from celery_idempotent.operations.records.reader import RecordView

_UNITS = {"": "seconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def parse_duration(text: str) -> timedelta:
    """Returns the duration that ``90``, ``90s``, ``10m``, ``2h`` or ``1d`` describes.

    A number without a unit is in seconds.

    Raises:
        ValueError: if it has another form or is too long.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration: write 90s, 10m, 2h or 1d")
    try:
        return timedelta(**{_UNITS[match[2]]: float(match[1])})
    except OverflowError:
        raise ValueError(f"{text!r} is too long: write less than 1000000000d") from None


def relative_time(moment: datetime | None, now: datetime) -> str:
    """Returns ``3 min 20 s ago`` or ``in 23 h``, as the dashboard's countdowns do."""
    if moment is None:
        return "–"
    seconds = (moment - now).total_seconds()
    text = _units(abs(seconds))
    return f"in {text}" if round(seconds) > 0 else f"{text} ago"


def _units(seconds: float) -> str:
    """Returns the two largest units, such as ``1 d 2 h``."""
    left, parts = round(seconds), []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, left = divmod(left, size)
        parts.append((number, unit))
    first = next((n for n, (number, _) in enumerate(parts) if number), 3)
    shown = parts[first : first + 2]
    return " ".join(f"{number} {unit}" for number, unit in shown if number) or "0 s"


def absolute_time(moment: datetime | None, now: datetime) -> str:
    """Returns ``2026-11-21 15:45:49 UTC, 3 min ago``."""
    if moment is None:
        return "–"
    return f"{utc(moment)}, {relative_time(moment, now)}"


def utc(moment: datetime) -> str:
    """Returns ``2026-11-21 15:45:49 UTC``."""
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def duration(seconds: float) -> str:
    """Returns ``2 min 30 s``; short durations as ``250 ms`` or ``2.5 s``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 and seconds % 1 else _units(seconds)


def size(number: float | None) -> str:
    """Returns ``1.2 MB``."""
    import humanize

    if number is None:
        return "–"
    text: str = humanize.naturalsize(number)
    return text


def deaths(record: Record) -> str:
    """Returns ``2 earlier executions died``; empty if none did."""
    if layout.is_poisoned(record):
        return f"{plural(record.attempt, 'execution')} died"
    died = record.attempt - 1
    return f"{plural(died, 'earlier execution')} died" if died > 0 else ""


def run_time(record: Record) -> str:
    """Returns how long the execution took; empty if unfinished or unknown."""
    if record.started_at is None or record.finished_at is None or layout.is_poisoned(record):
        return ""
    # Rounding can make it negative: milliseconds at the end, microseconds at the start.
    return duration(max(0.0, (record.finished_at - record.started_at).total_seconds()))


def finished_steps(record: Record | None) -> list[str]:
    """Returns the names of the finished steps of an unfinished execution."""
    if record is None or record.state.finished:
        return []
    try:
        return [name for name in steps.read(record.body, record.key) if name]
    except IdempotencyError:  # only the beginning of a long record was read
        return []


def view_fields(view: RecordView) -> dict[str, Any]:
    """Returns the fields of a record; the state of an unreadable one is ``CORRUPT``.

    If it was found by a duplicate's task id, ``duplicate`` has the duplicate's reference.
    """
    key = view.key
    fields = key_fields(key, view.state) if view.record is None else record_fields(view.record)
    if view.reference is None:
        return fields
    duplicate = view.reference._asdict() | {"end": _became(view.reference)[0]}
    return fields | {"duplicate": {"replayed": view.reference.replayed, **duplicate}}


def _became(met: Reference) -> tuple[str, str]:
    return BECAME.get(met.end, ("unknown", "found"))


def became_text(met: Reference) -> str:
    """Returns the end of a sentence about the duplicate that met a record."""
    return f"{_became(met)[1]} task {met.task_id} (attempt {met.attempt})"


def key_fields(key: Key, state: str) -> dict[str, Any]:
    """Returns the fields of a key whose record is absent or unreadable."""
    return {"key": str(key), "explicit": key.explicit, "task": key.task, "state": state}


class Field(NamedTuple):
    """A field of a record, as programs and people see it."""

    #: Its name in JSON documents; empty if only people see it.
    name: str
    #: Its title in `show` and on the dashboard's page of the record; empty if only programs see it.
    title: str = ""
    #: Its explanation in docs/reference/command-line.md.
    note: str = ""
    #: Returns its text for people, who see nothing if it is empty; None: the text of its value.
    format: Callable[[Record, datetime], str] | None = None

    def text(self, record: Record, now: datetime) -> str:
        """Returns the text for people."""
        if self.format is not None:
            return self.format(record, now)
        value = getattr(record, self.name)
        return absolute_time(value, now) if isinstance(value, datetime) else str(value or "")


def _attempts(record: Record, _: datetime) -> str:
    died = deaths(record)
    return f"{record.attempt}: {died}" if died else str(record.attempt)


def _until(state: State, record: Record, now: datetime) -> str:
    if record.state is not state or record.deadline is None:
        return ""
    verb = "expired" if record.deadline <= now else "until"
    return f"{verb} {absolute_time(record.deadline, now)}"


_STATES = (
    "`RESERVED`, `STARTED`, `COMPLETED`, `FAILED`; `CORRUPT` has `key`, `explicit` and `task` alone"
)
_ENDED_BY = "of a STARTED record whose execution has ended: " + ", ".join(
    f"`{end}`" for end in sorted(layout.ENDS)
)
#: The fields of an execution or a message. Those of a lease in `celery inspect` are among them.
FACTS = (
    Field("task_id", "task id"),
    Field("worker", "worker"),
    Field("token", "token"),
    Field("attempt", "attempt", format=_attempts),
    Field("ended_by", "ended by", _ENDED_BY, lambda r, _: (r.ended_by or "").replace("_", " ")),
    Field("", "finished steps", format=lambda record, _: ", ".join(finished_steps(record))),
)
#: All fields except the outcome, in the order of `show`.
FIELDS = (
    Field("key", "key"),
    Field("label", "label"),
    Field("explicit"),
    Field("task"),
    Field("state", "state", _STATES),
    *FACTS,
    Field("started_at", "started"),
    Field("deadline", "lease", "of the lease or the reservation", partial(_until, State.STARTED)),
    Field("deadline", "reserved", format=partial(_until, State.RESERVED)),
    Field("finished_at", "finished"),
    Field("", "duration", format=lambda record, _: run_time(record)),
    Field("expires_at", "kept until"),
)


def record_fields(record: Record, fields: Iterable[Field] = FIELDS) -> dict[str, Any]:
    """Returns `fields` for programs. Times are ISO 8601 in UTC."""
    values = {field.name: getattr(record, field.name) for field in fields if field.name}
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in values.items()
    }


def record_texts(record: Record, now: datetime, fields: Iterable[Field] = FIELDS) -> dict[str, str]:
    """Returns `fields` for people, by title; some are empty."""
    return {field.title: field.text(record, now) for field in fields if field.title}


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


def key_error(error: KeyRuleError) -> str:
    """Returns `error` with the message of its cause, for the person who gave the arguments."""
    cause = error.__cause__
    return str(error) if cause is None else f"{error} ({type(cause).__name__}: {_message(cause)})"


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
