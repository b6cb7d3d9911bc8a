"""Celery's moments, as durations."""

from __future__ import annotations

from datetime import datetime, timezone

from celery.utils.time import maybe_iso8601, maybe_make_aware


def seconds_until(when: float | datetime | str | None) -> float:
    """From now until a countdown (seconds) or an eta; 0 where it is past or there is none.

    An eta may be ISO 8601 text, as in a message, and one without a zone is UTC, as to a worker.
    """
    if isinstance(when, (datetime, str)):
        eta: datetime = maybe_make_aware(maybe_iso8601(when), timezone.utc)
        return max(0.0, (eta - datetime.now(timezone.utc)).total_seconds())
    return float(when or 0.0)
