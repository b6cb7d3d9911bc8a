"""Celery's moments, as durations."""

from __future__ import annotations

from datetime import datetime, timezone


def seconds_until(when: float | datetime | None) -> float:
    """From now until a countdown (seconds) or an eta; 0 where it is past or there is none."""
    if isinstance(when, datetime):
        now = datetime.now(timezone.utc if when.tzinfo else None)
        return max(0.0, (when - now).total_seconds())
    return float(when or 0.0)
