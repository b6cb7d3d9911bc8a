"""Tests of figures and interleaving; they measure nothing."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from labs.benchmarks.environments import CONTROL, cost_of
from labs.benchmarks.figure import Spread
from labs.benchmarks.interleaving import round_order
from labs.comparison.contestants import OURS, PLAIN


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


def test_ratios_and_differences_are_those_within_a_round() -> None:
    # In the second round, the machine was ten times slower for all.
    rounds = {PLAIN.name: [1, 10, 1], CONTROL: [1, 10, 1], OURS.name: [1.5, 15, 1.5]}

    assert Spread.from_ratios(rounds[OURS.name], rounds[PLAIN.name]).median == 1.5
    assert cost_of("time", "ms", rounds).more.median == 0.5
