"""The pure parts: figures, turns, tables and pages."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from itertools import pairwise

import pytest

from tests.labs.benchmarks import apart
from tests.labs.benchmarks.figure import Figure, Finding, Goal, Spread, number
from tests.labs.benchmarks.measure import Measure, Show
from tests.labs.benchmarks.measures import MEASURES
from tests.labs.benchmarks.page import DOCS, between
from tests.labs.benchmarks.report import MET, MISSED, Report, earlier
from tests.labs.benchmarks.turns import in_turn, take_turns


class Example(Measure):
    """What it measures."""

    name = "example"
    title = "an example"

    def measure(self, show: Show) -> Finding:
        return Finding()


FAST = Figure("fast", 1.2, "×", Goal(1.25), Spread(1.2, 1.1, 1.3))
SLOW = Figure("slow", 9.81, "µs", Goal(8))
FREE = Figure("free", 1234)
REPORT = Report({Example(): Finding([FAST, SLOW, FREE])}, "two cores", 60)


class TestSpread:
    def test_is_the_median_and_the_middle_half(self) -> None:
        assert Spread.of([5, 1, 2, 4, 3]) == Spread(3, 2, 4)

    def test_of_one_is_that_one(self) -> None:
        assert Spread.of([7]) == Spread(7, 7, 7)

    def test_of_ratios_compares_within_a_round(self) -> None:
        # The machine was ten times as slow in the second round, for both.
        assert Spread.of_ratios([2, 20, 3], [1, 10, 1]).middle == 2


@pytest.mark.parametrize(
    ("sign", "met"),
    [("≤", (True, True, False)), ("<", (True, False, False)),
     ("=", (False, True, False)), ("≥", (False, True, True))],
)  # fmt: skip
def test_a_goal_bounds_what_was_measured(sign: str, met: tuple[bool, ...]) -> None:
    assert tuple(Goal(2, sign).is_met_by(value) for value in (1.99, 2, 2.001)) == met


def test_a_figure_without_a_goal_neither_meets_nor_misses() -> None:
    assert FREE.is_met is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(2, "2"), (2.0, "2"), (1.254, "1.25"), (12.34, "12.3"), (123.4, "123"), (5e6, "5,000,000")],
)
def test_a_number_has_three_digits_or_all_before_the_point(value: float, text: str) -> None:
    assert number(value) == text


def test_nobody_is_always_first_nor_always_after_the_same() -> None:
    names = dict.fromkeys("abcd")
    rounds = [list(in_turn(names, number)) for number in range(8)]

    assert all(sorted(each) == [*"abcd"] for each in rounds)
    assert Counter(each[0] for each in rounds) == dict.fromkeys("abcd", 2)
    after = Counter(pair for each in rounds for pair in pairwise(each))
    assert all(after[a, b] == after[b, a] for a, b in after)


def test_each_takes_as_many_turns() -> None:
    calls: Counter[str] = Counter()
    done: list[float] = []

    times = take_turns({n: lambda n=n: calls.update(n) for n in "ab"}, 3, 5, done.append)

    assert {name: len(each) for name, each in times.items()} == {"a": 3, "b": 3}
    assert calls == {"a": 20, "b": 20}  # with one to warm up
    assert done[-1] == 1


class TestReport:
    def test_tells_what_is_missed(self) -> None:
        assert REPORT.missed() == [SLOW]
        assert REPORT.verdict == "1 of 2 goals are met"

    def test_of_goals_has_what_was_asked(self) -> None:
        assert REPORT.goals("benchmarks").splitlines()[2:] == [
            f"| an example | fast | 1.20 × | 1.10–1.30 | ≤ 1.25 × | {MET} |",
            f"|  | slow | 9.81 µs |  | ≤ 8 µs | {MISSED} |",
        ]

    def test_of_figures_has_all_of_them_and_how(self) -> None:
        page = REPORT.figures("benchmarks", {"example": ["benchmarks/example.svg"]})

        assert page.startswith("### an example\n\nWhat it measures.\n\n|")
        assert "| free | 1,234 |  |  |  |" in page
        assert page.endswith("![an example](benchmarks/example.svg)")

    def test_is_of_one_page(self) -> None:
        assert REPORT.figures("scaling", {}) == ""

    def test_tables_are_whole(self) -> None:
        for table in (REPORT.goals("benchmarks"), REPORT.figures("benchmarks", {})):
            bars = {line.count("|") for line in table.splitlines() if line.startswith("|")}
            assert len(bars) == 1

    def test_can_be_set_beside_an_earlier_one(self) -> None:
        before = earlier(REPORT.json())
        faster = Finding([Figure("slow", 6, "µs", Goal(8)), Figure("new", 1)])

        later = Report({Example(): faster}, "", 1, before).goals("benchmarks")

        assert "| slow | 9.81 µs | 6 µs |" in later

    def test_says_why_there_is_nothing(self) -> None:
        missing = Report({Example(): Finding(why_not="no such tool here")}, "", 1)

        assert "no such tool here" in missing.figures("benchmarks", {})
        assert not missing.broken()

    def test_as_json_has_the_raw_values_in_four_digits(self) -> None:
        finding = Finding([FAST], raw={"µs": {"a": [1.23456, 2]}})
        facts = json.loads(Report({Example(): finding}, "", 1).json())

        assert facts["measures"]["example"]["raw"] == {"µs": {"a": [1.235, 2]}}
        assert facts["measures"]["example"]["figures"][0]["met"] is True


class TestPage:
    def test_keeps_what_people_wrote(self) -> None:
        text = "before\n<!-- goals -->\nold\n<!-- /goals -->\nafter"

        once = between(text, "goals", "new")

        assert once == "before\n<!-- goals -->\n\nnew\n\n<!-- /goals -->\nafter"
        assert between(once, "goals", "new") == once

    def test_may_do_without_a_mark_but_not_without_its_end(self) -> None:
        assert between("nothing", "goals", "new") == "nothing"
        with pytest.raises(ValueError, match="without"):
            between("<!-- goals -->", "goals", "new")

    @pytest.mark.parametrize("page", sorted({measure.page for measure in MEASURES}))
    def test_of_every_measure_has_its_marks(self, page: str) -> None:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")

        for name in ("setting", "figures"):
            assert f"<!-- {name} -->" in text
            assert f"<!-- /{name} -->" in text


class TestApart:
    def test_a_process_that_ends_is_told_of(self) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        done: list[float] = []
        theirs.send(0.5)
        theirs.close()

        finding = apart._told(ours, 10, done.append)

        assert finding.broken
        assert done == [0.5]

    def test_one_that_has_no_time_left_is_not_begun(self) -> None:
        assert apart.measured(Example(), 0.0, print).broken == "there was no time left"

    def test_one_that_takes_too_long_is_given_up(self) -> None:
        ours, _theirs = multiprocessing.Pipe(duplex=False)

        assert apart._told(ours, 0.01, print).why_not == "given up after 0.01 s"


def test_no_two_measures_have_one_name() -> None:
    assert len({measure.name for measure in MEASURES}) == len(MEASURES)
