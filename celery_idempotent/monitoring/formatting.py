"""Formats times, durations, sizes and counts for people, and parses durations that they write."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.record import steps
from celery_idempotent.record.record import Record

_UNITS = {"": "seconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def parse_duration(text: str) -> timedelta:
    """Returns the duration that ``90``, ``90s``, ``10m``, ``2h`` or ``1d`` describes.

    A number without a unit is in seconds.

    Raises:
        ValueError: if it is not of this form, or too long.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration: write 90s, 10m, 2h or 1d")
    try:
        return timedelta(**{_UNITS[match[2]]: float(match[1])})
    except OverflowError:
        raise ValueError(f"{text!r} is too long: write less than 1000000000d") from None


def relative_time(moment: datetime | None, now: datetime) -> str:
    """Returns ``3 minutes ago`` or ``23 hours from now``."""
    import humanize

    if moment is None:
        return "–"
    text: str = humanize.naturaltime(now - moment)
    return text


def absolute_time(moment: datetime | None, now: datetime) -> str:
    """Returns ``2026-11-21 15:45:49 UTC, 3 minutes ago``."""
    if moment is None:
        return "–"
    return f"{utc(moment)}, {relative_time(moment, now)}"


def utc(moment: datetime) -> str:
    """Returns ``2026-11-21 15:45:49 UTC``."""
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def duration(seconds: float) -> str:
    """Returns ``2 minutes and 30 seconds``; durations below a second in milliseconds."""
    import humanize

    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    text: str = humanize.precisedelta(timedelta(seconds=seconds), format="%0.0f")
    return text


def size(number: float | None) -> str:
    """Returns ``1.2 MB``."""
    import humanize

    if number is None:
        return "–"
    text: str = humanize.naturalsize(number)
    return text


def plural(number: int, noun: str) -> str:
    """Returns ``1 record`` or ``2,000 records``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def deaths(record: Record) -> str:
    """Returns ``2 earlier executions died``; empty if none has."""
    died = record.attempt - 1
    return f"{plural(died, 'earlier execution')} died" if died > 0 else ""


def run_time(record: Record) -> str:
    """Returns how long the execution took; empty before its end, and where it is unknown."""
    if record.started_at is None or record.finished_at is None:
        return ""
    # The end is stored in milliseconds, the start in microseconds.
    return duration(max(0.0, (record.finished_at - record.started_at).total_seconds()))


def finished_steps(record: Record | None) -> list[str]:
    """Returns the names of the steps that an unfinished execution has finished."""
    if record is None or record.state.finished:
        return []
    try:
        return list(steps.read(record.body, record.key))
    except IdempotencyError:  # only the beginning of a long record was read
        return []
