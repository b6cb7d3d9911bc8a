"""Limits what is logged of one cause to once a minute, and counts the rest."""

from __future__ import annotations

from collections.abc import Hashable

from celery_idempotent.clock import monotonic

#: Seconds between two lines about one cause.
INTERVAL = 60.0


class Repeats:
    """What was logged in this process; threads may miscount by one or two."""

    def __init__(self) -> None:
        self._logged: dict[Hashable, tuple[float, int]] = {}

    def left_out(self, cause: Hashable) -> int | None:
        """Returns how many were left out since the last one; None: leave this one out, too."""
        now = monotonic()
        logged_at, number = self._logged.get(cause, (-INTERVAL, 0))
        if now - logged_at < INTERVAL:
            self._logged[cause] = logged_at, number + 1
            return None
        self._logged[cause] = now, 0
        return number


def like_it(number: int) -> str:
    """Returns the end of a line that stands for `number` others; empty for none."""
    return f" (and {number:,} like it)" if number else ""
