"""Countdowns and etas, as seconds from now."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_idempotent.task.requeue import hold_for, seconds_until

IN_A_WEEK = datetime.now(timezone.utc) + timedelta(days=7)


@pytest.mark.parametrize(("countdown", "seconds"), [(None, 0), (0, 0), (2, 2), (0.5, 0.5)])
def test_a_countdown_is_its_seconds(countdown: Any, seconds: float) -> None:
    assert seconds_until(countdown) == seconds


@pytest.mark.parametrize(
    "eta",
    [
        IN_A_WEEK,
        IN_A_WEEK.astimezone(timezone(timedelta(hours=-5))),
        IN_A_WEEK.replace(tzinfo=None),
        IN_A_WEEK.isoformat(),
        IN_A_WEEK.replace(tzinfo=None).isoformat() + "Z",
    ],
    ids=["UTC", "of another zone", "without a zone", "text", "text in UTC"],
)
def test_an_eta_is_so_far_away(eta: Any) -> None:
    # The suite may have been at work for an hour.
    assert timedelta(days=6) < timedelta(seconds=seconds_until(eta)) <= timedelta(days=7)


def test_an_eta_that_is_past_is_now() -> None:
    assert seconds_until(IN_A_WEEK - timedelta(days=8)) == 0


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 60),
        ({"countdown": 5, "expires": None}, 65),
        ({"expires": 600}, 60),
        ({"expires": 5}, 5),
        ({"countdown": 600, "expires": 5}, 5),
        ({"expires": -5}, 0),
        ({"expires": "2020-01-01T00:00:00Z"}, 0),
        ({"eta": IN_A_WEEK, "expires": 5.5}, 5.5),
    ],
    ids=[
        *("nothing", "countdown", "lives longer", "ends first", "ends before it is due"),
        *("ended", "ended long ago", "ends before its eta"),
    ],
)
def test_a_key_is_kept_for_a_message_that_lives(options: Any, seconds: float) -> None:
    assert hold_for(options, lease=60.0) == seconds
