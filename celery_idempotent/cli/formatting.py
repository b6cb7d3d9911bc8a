"""Times, spans and sizes in words."""

from __future__ import annotations

from datetime import datetime, timedelta


def when(moment: datetime | None, now: datetime) -> str:
    """``3 minutes ago``, ``23 hours from now``."""
    import humanize

    if moment is None:
        return "–"
    text: str = humanize.naturaltime(now - moment)
    return text


def exactly(moment: datetime | None, now: datetime) -> str:
    """The same, with the moment itself."""
    if moment is None:
        return "–"
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC, {when(moment, now)}"


def span(seconds: float) -> str:
    """``2 minutes and 30 seconds``; below a second in milliseconds."""
    import humanize

    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    text: str = humanize.precisedelta(timedelta(seconds=seconds), format="%0.0f")
    return text


def size(number: float) -> str:
    """``1.2 MB``."""
    import humanize

    text: str = humanize.naturalsize(number)
    return text


def plural(number: int, noun: str) -> str:
    """``1 record``, ``2,000 records``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
