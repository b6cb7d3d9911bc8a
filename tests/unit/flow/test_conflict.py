"""The delay after which a duplicate is requeued."""

from __future__ import annotations

import pytest

from celery_idempotent.flow.conflict import requeue_delay


def delays(requeue_count: int, lease: float) -> list[float]:
    return [requeue_delay(requeue_count, lease) for _ in range(200)]


@pytest.mark.parametrize(
    ("requeue_count", "longest"),
    [(0, 1), (1, 2), (2, 4), (3, 8), (4, 16), (5, 32), (6, 60), (7, 60)],
)
def test_a_second_then_twice_that_up_to_one_lease(requeue_count: int, longest: float) -> None:
    several = delays(requeue_count, lease=60)

    assert max(several) <= longest
    assert min(several) >= 0.75 * longest


def test_up_to_a_quarter_is_left_to_chance() -> None:
    several = delays(3, lease=60)

    assert max(several) > 7.8
    assert min(several) < 6.2
    assert len(set(several)) > 100


def test_a_lease_of_less_than_a_second_makes_it_no_shorter() -> None:
    assert all(0.75 <= delay <= 1 for delay in delays(9, lease=0.5))


def test_a_message_that_has_come_back_for_years_has_a_delay() -> None:
    assert 45 <= requeue_delay(10_000_000, 60) <= 60
