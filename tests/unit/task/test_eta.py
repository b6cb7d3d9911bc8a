"""Countdowns and etas, as seconds from now."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_idempotent.task.republish import hold_for, seconds_until

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
    ids=["UTC", "another time zone", "no time zone", "text", "text in UTC"],
)
def test_the_seconds_until_an_eta(eta: Any) -> None:
    # IN_A_WEEK is from the import; the suite may have been running for an hour.
    assert timedelta(days=6) < timedelta(seconds=seconds_until(eta)) <= timedelta(days=7)


def test_an_eta_in_the_past_is_now() -> None:
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
        *("no options", "countdown", "expires later", "expires first", "expires before it is due"),
        *("expired", "expired long ago", "expires before its eta"),
    ],
)
def test_a_key_is_reserved_until_its_message_is_due_or_expires(
    options: Any, seconds: float
) -> None:
    assert hold_for(options, lease=60.0) == seconds
