"""Tests of figures, interleaving, tables and pages; they measure nothing."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from itertools import pairwise

import pytest

from labs.benchmarks import isolation
from labs.benchmarks.costs import cost_of
from labs.benchmarks.environments import CONTROL
from labs.benchmarks.figure import Figure, Goal, MeasureResult, Spread
from labs.benchmarks.interleaving import round_order
from labs.benchmarks.measure import FIGURES, Measure, ProgressCallback
from labs.benchmarks.measures import MEASURES
from labs.benchmarks.page import DOCS
from labs.benchmarks.report import Report, parse_values
from labs.comparison.contestants import OURS, PLAIN


class Example(Measure):
    """Description of the example."""

    name = "example"
    title = "an example"

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        return MeasureResult()


FAST = Figure("fast", 1.2, "×", Goal(1.25), Spread(1.2, 1.1, 1.3))
SLOW = Figure("slow", 9.81, "µs", Goal(8))
FREE = Figure("free", 1234)
REPORT = Report({Example(): MeasureResult([FAST, SLOW, FREE])}, "two cores", 60)


def test_spread_is_the_median_and_the_interquartile_range() -> None:
    assert Spread.from_values([5, 1, 2, 4, 3]) == Spread(3, 2, 4)
    assert Spread.from_values([7]) == Spread(7, 7, 7)


def test_round_order_favours_no_name() -> None:
    names = dict.fromkeys("abcd")
    rounds = [list(round_order(names, number)) for number in range(8)]

    assert all(sorted(each) == [*"abcd"] for each in rounds)
    assert Counter(each[0] for each in rounds) == dict.fromkeys("abcd", 2)
    pairs = Counter(pair for each in rounds for pair in pairwise(each))
    assert all(pairs[a, b] == pairs[b, a] for a, b in pairs)


class TestReport:
    def test_compares_with_an_earlier_run(self) -> None:
        before = parse_values(REPORT.json())
        faster = MeasureResult([Figure("slow", 6, "µs", Goal(8)), Figure("new", 1)])

        later = Report({Example(): faster}, "", 1, before).figures("benchmarks", {})

        assert "| slow | 9.81 µs | 6 µs |" in later


def test_ratios_and_differences_are_those_within_a_round() -> None:
    # In the second round, the machine was ten times slower for all.
    rounds = {PLAIN.name: [1, 10, 1], CONTROL: [1, 10, 1], OURS.name: [1.5, 15, 1.5]}

    assert Spread.from_ratios(rounds[OURS.name], rounds[PLAIN.name]).median == 1.5
    assert cost_of("time", "ms", rounds).more.median == 0.5


@pytest.mark.parametrize(
    ("page", "section"),
    sorted(
        {
            *((measure.page, measure.section) for measure in MEASURES),
            *(("benchmarks", name) for name in ("setting", "costs", "goals")),
        }
        - {("benchmarks", FIGURES)}  # all of them are in figures.json
    ),
)
def test_page_has_marks(page: str, section: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")

    assert f"<!-- {section} -->" in text
    assert f"<!-- /{section} -->" in text


@pytest.mark.parametrize(
    ("ends", "failure"), [(True, "its process ended"), (False, "timed out after 0.01 s")]
)
def test_a_process_that_ends_early_or_not_in_time_has_failed(ends: bool, failure: str) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    done: list[float] = []
    sender.send(0.5)
    if ends:
        sender.close()

    result = isolation._receive(receiver, 0.01, done.append)

    assert result.failure == failure
    assert done == [0.5]
