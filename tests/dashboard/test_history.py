"""Differences of counters, as workers start, restart and fall silent."""

from __future__ import annotations

from celery_idempotent.dashboard.history import HEIGHT, STEP, STEPS, History, chart


def sample(history: History, now: float, **workers: int) -> None:
    history.add(now, {name: {"shop.charge": {"run": number}} for name, number in workers.items()})


def test_counts_what_happened_between_two_samples() -> None:
    history = History()
    sample(history, 0, one=100, two=7)
    sample(history, 2, one=103, two=7)
    sample(history, STEP, one=104, two=9)

    numbers = history.numbers(("run",), STEP)

    assert len(numbers) == STEPS
    assert numbers[-2:] == [3, 3]
    assert sum(numbers) == 6, "not what happened before the first sample"


def test_a_restarted_worker_begins_at_zero() -> None:
    history = History()
    sample(history, 0, one=100)
    sample(history, 1, one=4)

    assert history.numbers(("run",), 1)[-1] == 4


def test_a_worker_that_did_not_reply_once_is_counted_once() -> None:
    history = History()
    sample(history, 0, one=10)
    sample(history, 1)
    sample(history, 2, one=15)

    assert history.numbers(("run",), 2)[-1] == 5


def test_a_new_task_of_a_known_worker_is_counted_from_zero() -> None:
    history = History()
    sample(history, 0, one=10)
    history.add(1, {"one": {"shop.charge": {"run": 10}, "shop.pack": {"run": 2, "replay": 1}}})

    assert history.numbers(("run", "replay"), 1)[-1] == 3


def test_keeps_one_hour() -> None:
    history = History()
    for number in range(3 * STEPS):
        sample(history, number * STEP, one=number)

    assert history.numbers(("run",), (3 * STEPS - 1) * STEP) == [1] * STEPS
    assert history.numbers(("run",), 9 * STEPS * STEP) == [0] * STEPS


def test_a_chart_has_a_bar_for_each_number_above_zero() -> None:
    drawn = chart("Runs", [0, 5, 0, 10])

    assert (drawn.total, drawn.highest, drawn.path.count("M")) == (15, 10, 2)
    assert f" {HEIGHT / 2:.1f}h" in drawn.path
    assert chart("Runs", []).path == ""
