"""Differences of counters, as workers start, restart and fall silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.dashboard.history import RANGES, STEP, History
from celery_idempotent.dashboard.presentation import environment


def sample(history: History, now: float, **workers: int) -> None:
    history.add(now, {name: {"shop.charge": {"run": number}} for name, number in workers.items()})


def bars(history: History, now: float, *names: str, of: str = "1h") -> list[int]:
    numbers = history.range(of, now).numbers
    return [sum(column) for column in zip(*(numbers[name] for name in names), strict=True)]


def test_counts_what_happened_between_two_samples() -> None:
    history = History()
    sample(history, 0, one=100, two=7)
    sample(history, 2, one=103, two=7)
    sample(history, STEP, one=104, two=9)

    numbers = bars(history, STEP, "run")

    assert len(numbers) == RANGES["1h"][0] // STEP
    assert numbers[-2:] == [3, 3]
    assert sum(numbers) == 6, "not what happened before the first sample"


@pytest.mark.parametrize(
    ("second", "third", "counted"),
    [({"one": 4}, {"one": 4}, 4), ({}, {"one": 105}, 5)],
    ids=["a restart begins at zero", "no reply once"],
)
def test_a_worker_is_counted_once(second: Any, third: Any, counted: int) -> None:
    history = History()
    for now, workers in enumerate(({"one": 100}, second, third)):
        sample(history, now, **workers)

    assert bars(history, 2, "run")[-1] == counted


def test_a_new_task_of_a_known_worker_is_counted_from_zero() -> None:
    history = History()
    sample(history, 0, one=10)
    history.add(1, {"one": {"shop.charge": {"run": 10}, "shop.pack": {"run": 2, "replay": 1}}})

    assert bars(history, 1, "run", "replay")[-1] == 3


@pytest.mark.parametrize("of", RANGES)
def test_a_range_has_what_happened_in_it(of: str) -> None:
    history, (seconds, width) = History(), RANGES[of]
    steps = seconds // STEP
    # Whole bars, from a time that a bar begins with.
    for number in range(0, 2 * steps, width):
        sample(history, number * STEP, one=number // width)

    found = history.range(of, (2 * steps - 1) * STEP)
    assert found.numbers == {"run": [1] * (steps // width)}
    assert found.tasks == {"shop.charge": {"run": steps // width}}
    assert found.since == (0 if of != "7d" else found.since)
    assert history.range(of, 9 * steps * STEP).numbers == {}


def test_a_file_keeps_what_was_counted_before_a_restart(tmp_path: Path) -> None:
    file = str(tmp_path / "history.sqlite")
    before = History(file)
    sample(before, 0, one=5)
    sample(before, 1, one=8)
    after = History(file)
    sample(after, 20 * STEP, one=100)
    sample(after, 20 * STEP + 1, one=101)

    found = after.range("1h", 20 * STEP + 2)

    assert found.tasks == {"shop.charge": {"run": 4}}, "not what happened without a dashboard"
    assert (found.since, found.seen) == (0, 2 * STEP)


def test_two_dashboards_with_one_file_count_once(tmp_path: Path) -> None:
    file = str(tmp_path / "history.sqlite")
    for history in (History(file), History(file)):
        sample(history, 0, one=5)
        sample(history, 1, one=8)

    assert bars(history, 2, "run")[-1] == 3


def test_a_chart_has_a_bar_for_each_number_above_zero() -> None:
    bars = environment.get_template("parts.html").module.bars

    path = bars([0, 5, 0, 10])
    assert path == "M150.0 40.0h149.0V80h-149.0zM450.0 0.0h149.0V80h-149.0z"
    assert not bars([0, 0])
