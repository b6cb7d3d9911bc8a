"""The time at which a message may begin, and until which its key is reserved for it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware


def seconds_until(when: float | datetime | str | None) -> float:
    """Returns the seconds until a countdown (seconds) or an eta; 0 for None and for the past.

    An eta may be ISO 8601 text, as in a message. Without a time zone it is in UTC, as in a worker.
    """
    if isinstance(when, (datetime, str)):
        eta: datetime = maybe_make_aware(maybe_iso8601(when), timezone.utc)
        return max(0.0, (eta - datetime.now(timezone.utc)).total_seconds())
    return float(when or 0.0)


def delay_of(options: Mapping[str, Any]) -> float:
    """Returns the seconds until the eta or countdown in `options`; 0 without one."""
    return seconds_until(options.get("eta") or options.get("countdown"))


def hold_for(options: Mapping[str, Any], lease: float) -> float:
    """Returns the seconds for which a key is reserved for a message published with `options`.

    The reservation ends `lease` seconds after the message's eta, or at its expiry if that is first.
    """
    hold = delay_of(options) + lease
    expires = options.get("expires")
    return hold if expires is None else min(hold, max(0.0, seconds_until(expires)))
