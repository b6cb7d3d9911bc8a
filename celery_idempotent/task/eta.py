"""Celery's moments, as durations."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware


def seconds_until(when: float | datetime | str | None) -> float:
    """From now until a countdown (seconds) or an eta; 0 where it is past or there is none.

    An eta may be ISO 8601 text, as in a message, and one without a zone is UTC, as to a worker.
    """
    if isinstance(when, (datetime, str)):
        eta: datetime = maybe_make_aware(maybe_iso8601(when), timezone.utc)
        return max(0.0, (eta - datetime.now(timezone.utc)).total_seconds())
    return float(when or 0.0)


def hold_for(options: Mapping[str, Any], lease: float) -> float:
    """Seconds that a key is kept for the message that is published with these `options`.

    A lease beyond its eta, but not beyond its time of expiry.
    """
    hold = seconds_until(options.get("eta") or options.get("countdown")) + lease
    expires = options.get("expires")
    return hold if expires is None else min(hold, max(0.0, seconds_until(expires)))
