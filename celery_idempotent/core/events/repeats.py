"""Limits the log lines about one cause to one a minute, and counts those left out."""

from __future__ import annotations

from collections.abc import Hashable

from celery_idempotent.core.clock import monotonic

#: Seconds between two lines about one cause.
INTERVAL = 60.0


class Repeats:
    """The causes that this process has logged; threads may miscount by one or two."""

    def __init__(self) -> None:
        self._logged: dict[Hashable, tuple[float, int]] = {}

    def left_out(self, cause: Hashable) -> int | None:
        """Returns the number of lines left out since the last one; None to leave this one out."""
        now = monotonic()
        logged_at, number = self._logged.get(cause, (-INTERVAL, 0))
        if now - logged_at < INTERVAL:
            self._logged[cause] = logged_at, number + 1
            return None
        self._logged[cause] = now, 0
        return number


def like_it(number: int) -> str:
    """Returns the end of a line that represents `number` others; empty for 0."""
    return f" (and {number:,} like it)" if number else ""
