"""Countdowns and etas, as seconds from now."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_idempotent.entry.clock import seconds_until

IN_AN_HOUR = datetime.now(timezone.utc) + timedelta(hours=1)


@pytest.mark.parametrize(("countdown", "seconds"), [(None, 0), (0, 0), (2, 2), (0.5, 0.5)])
def test_a_countdown_is_its_seconds(countdown: Any, seconds: float) -> None:
    assert seconds_until(countdown) == seconds


@pytest.mark.parametrize(
    "eta",
    [
        IN_AN_HOUR,
        IN_AN_HOUR.astimezone(timezone(timedelta(hours=-5))),
        IN_AN_HOUR.replace(tzinfo=None),
        IN_AN_HOUR.isoformat(),
        IN_AN_HOUR.replace(tzinfo=None).isoformat() + "Z",
    ],
    ids=["UTC", "of another zone", "without a zone", "text", "text in UTC"],
)
def test_an_eta_is_so_far_away(eta: Any) -> None:
    assert 3000 < seconds_until(eta) <= 3600


def test_an_eta_that_is_past_is_now() -> None:
    assert seconds_until(IN_AN_HOUR - timedelta(hours=2)) == 0
