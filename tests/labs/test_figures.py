"""Tests of figures, interleaving, tables and pages; they measure nothing."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from itertools import pairwise

import pytest

from labs.benchmarks import isolation
from labs.benchmarks.costs import cost_of
from labs.benchmarks.environments import CONTROL
from labs.benchmarks.figure import Figure, Goal, MeasureResult, Spread
from labs.benchmarks.interleaving import interleave, round_order
from labs.benchmarks.measure import FIGURES, Measure, ProgressCallback
from labs.benchmarks.measures import MEASURES
from labs.benchmarks.page import DOCS, replace_section
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


class TestSpread:
    def test_has_median_and_interquartile_range(self) -> None:
        assert Spread.from_values([5, 1, 2, 4, 3]) == Spread(3, 2, 4)

    def test_of_a_single_value_is_empty(self) -> None:
        assert Spread.from_values([7]) == Spread(7, 7, 7)

    def test_of_ratios_compares_within_a_round(self) -> None:
        # In the second round, the machine was ten times slower for both.
        assert Spread.from_ratios([2, 20, 3], [1, 10, 1]).median == 2


@pytest.mark.parametrize(
    ("sign", "met"),
    [("≤", (True, True, False)), ("<", (True, False, False)),
     ("=", (False, True, False)), ("≥", (False, True, True))],
)  # fmt: skip
def test_goal_compares_the_measured_value(sign: str, met: tuple[bool, ...]) -> None:
    assert tuple(Goal(2, sign).is_met_by(value) for value in (1.99, 2, 2.001)) == met


def test_round_order_favours_no_name() -> None:
    names = dict.fromkeys("abcd")
    rounds = [list(round_order(names, number)) for number in range(8)]

    assert all(sorted(each) == [*"abcd"] for each in rounds)
    assert Counter(each[0] for each in rounds) == dict.fromkeys("abcd", 2)
    pairs = Counter(pair for each in rounds for pair in pairwise(each))
    assert all(pairs[a, b] == pairs[b, a] for a, b in pairs)


def test_interleave_calls_all_contestants_equally_often() -> None:
    calls: Counter[str] = Counter()
    done: list[float] = []

    times = interleave({n: lambda n=n: calls.update(n) for n in "ab"}, 3, 5, done.append)

    assert {name: len(each) for name, each in times.items()} == {"a": 3, "b": 3}
    assert calls == {"a": 20, "b": 20}  # including the warm-up
    assert done[-1] == 1


class TestReport:
    def test_names_missed_goals(self) -> None:
        assert REPORT.missed() == [SLOW]
        assert REPORT.summary == "1 of 2 goals are met"

    def test_compares_with_an_earlier_run(self) -> None:
        before = parse_values(REPORT.json())
        faster = MeasureResult([Figure("slow", 6, "µs", Goal(8)), Figure("new", 1)])

        later = Report({Example(): faster}, "", 1, before).figures("benchmarks", {})

        assert "| slow | 9.81 µs | 6 µs |" in later

    def test_json_has_raw_values_with_four_digits(self) -> None:
        result = MeasureResult([FAST], raw={"µs": {"a": [1.23456, 2]}})
        document = json.loads(Report({Example(): result}, "", 1).json())

        assert document["measures"]["example"]["raw"] == {"µs": {"a": [1.235, 2]}}
        assert document["measures"]["example"]["figures"][0]["met"] is True


class TestCosts:
    def test_difference_is_that_within_a_round(self) -> None:
        # In the second round, the machine was ten times slower for all.
        rounds = {PLAIN.name: [1, 10, 1], CONTROL: [1, 10, 1], OURS.name: [1.5, 15, 1.5]}

        cost = cost_of("time", "ms", rounds)

        assert cost.more.median == 0.5
        assert cost.cells == ["time", "1 ms", "1.50 ms", "+0.50 ms", ""]


class TestPage:
    def test_mark_is_optional_but_needs_its_end_mark(self) -> None:
        assert replace_section("nothing", "goals", "new") == "nothing"
        with pytest.raises(ValueError, match="no end mark"):
            replace_section("<!-- goals -->", "goals", "new")

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
    def test_has_marks(self, page: str, section: str) -> None:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")

        assert f"<!-- {section} -->" in text
        assert f"<!-- /{section} -->" in text


class TestIsolation:
    def test_reports_a_process_that_ends_early(self) -> None:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        done: list[float] = []
        sender.send(0.5)
        sender.close()

        result = isolation._receive(receiver, 10, done.append)

        assert result.failure
        assert done == [0.5]

    def test_starts_no_process_without_time_left(self) -> None:
        assert isolation.run_in_process(Example(), 0.0, print).failure == "no time was left"

    def test_reports_a_timeout(self) -> None:
        receiver, _sender = multiprocessing.Pipe(duplex=False)

        assert isolation._receive(receiver, 0.01, print).missing == "timed out after 0.01 s"
