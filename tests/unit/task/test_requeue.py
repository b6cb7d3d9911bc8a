"""The pause of a worker that cannot publish a message again; countdowns and etas."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import SoftTimeLimitExceeded

from celery_idempotent.core.task.message.eta import hold_for, seconds_until
from celery_idempotent.core.task.publish import put_back
from tests.unit.conftest import shop, task_in

MINUTE = 60.0


def pause(
    deliveries: int | None = None, since: float = 0.0, app: Celery | None = None, **request: Any
) -> float:
    """Returns the pause for a message whose task began `since` seconds ago."""
    task = task_in(app or shop("amqp://"))
    headers = {} if deliveries is None else {"x-delivery-count": deliveries}
    context = Context(headers=headers, **request)
    return put_back.RequeuePause(task, context, time.monotonic() - since)._seconds


def test_the_pause_grows_with_the_delivery_count() -> None:
    assert [pause(number) for number in (None, 0, 1, 2)] == [1, 1, 4, 16]
    assert pause(20) == pause(10**6) == put_back.LONGEST_PAUSE
    assert sum(map(pause, range(20))) > 75 * MINUTE


def test_the_pause_ends_well_before_the_hard_time_limit() -> None:
    assert pause(20, since=10, timelimit=[40, None]) == pytest.approx(15, abs=0.5)
    assert pause(20, since=50, timelimit=[40, None]) <= 0


def test_the_pause_ends_well_before_the_visibility_timeout() -> None:
    redis = shop("redis://", broker_transport_options={"visibility_timeout": 30})

    assert pause(20, app=redis) == 15


def test_a_soft_time_limit_ends_the_pause() -> None:
    requeue_pause = put_back.RequeuePause(task_in(shop("amqp://")), Context(), time.monotonic())

    assert not requeue_pause.wait(SoftTimeLimitExceeded())


@pytest.mark.parametrize(
    ("url", "options", "seconds"),
    [
        ("amqp://", {}, 900),
        ("amqp://", {"visibility_timeout": 30}, 900),
        ("redis://", {}, 900),
        ("redis://", {"visibility_timeout": 30}, 15),
        ("sqs://", {}, 900),
        ("sqs://", {"visibility_timeout": 30}, 15),
        ("sqs://", {"predefined_queues": {"celery": {"url": "https://…"}}}, 15),
    ],
)
def test_the_longest_wait_in_a_worker(url: str, options: dict[str, Any], seconds: float) -> None:
    assert put_back.longest_wait(shop(url, broker_transport_options=options)) == seconds


IN_A_WEEK = datetime.now(timezone.utc) + timedelta(days=7)


ETAS: dict[str, Any] = {
    "UTC": IN_A_WEEK,
    "another time zone": IN_A_WEEK.astimezone(timezone(timedelta(hours=-5))),
    "no time zone": IN_A_WEEK.replace(tzinfo=None),
    "text": IN_A_WEEK.isoformat(),
    "text in UTC": IN_A_WEEK.replace(tzinfo=None).isoformat() + "Z",
}


@pytest.mark.parametrize("eta", ETAS.values(), ids=ETAS)
def test_the_seconds_until_an_eta(eta: Any) -> None:
    # IN_A_WEEK is from the import; the suite may have been running for an hour.
    assert timedelta(days=6) < timedelta(seconds=seconds_until(eta)) <= timedelta(days=7)


@pytest.mark.parametrize(
    ("countdown", "seconds"),
    [(None, 0), (0, 0), (2, 2), (0.5, 0.5), (IN_A_WEEK - timedelta(days=8), 0)],
)
def test_the_seconds_of_a_countdown_and_of_a_past_eta(countdown: Any, seconds: float) -> None:
    assert seconds_until(countdown) == seconds


RESERVED: dict[str, tuple[dict[str, Any], float]] = {
    "no options": ({}, 60),
    "countdown": ({"countdown": 5, "expires": None}, 65),
    "expires later": ({"expires": 600}, 60),
    "expires first": ({"expires": 5}, 5),
    "expires before it is due": ({"countdown": 600, "expires": 5}, 5),
    "expired": ({"expires": -5}, 0),
    "expired long ago": ({"expires": "2020-01-01T00:00:00Z"}, 0),
    "expires before its eta": ({"eta": IN_A_WEEK, "expires": 5.5}, 5.5),
}


@pytest.mark.parametrize(("options", "seconds"), RESERVED.values(), ids=RESERVED)
def test_a_key_is_reserved_until_a_message_is_due_or_expires(options: Any, seconds: float) -> None:
    assert hold_for(options, lease=60.0) == seconds
