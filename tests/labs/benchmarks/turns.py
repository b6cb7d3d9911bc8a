"""Lets contestants take turns, so that all of them see the machine as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from time import perf_counter_ns

from tests.labs.benchmarks.measure import Show

Call = Callable[[], object]
#: The median of each round, by contestant.
Rounds = dict[str, list[float]]


def take_turns(calls: Mapping[str, Call], rounds: int, each: int, show: Show) -> Rounds:
    """Microseconds of one call: the median of `each` in a row, `rounds` times by contestant."""
    for call in calls.values():
        median_us(call, each)  # connects, teaches scripts, warms up
    times: Rounds = {name: [] for name in calls}
    for number in range(rounds):
        for name in in_turn(calls, number):
            times[name].append(median_us(calls[name], each))
        show((number + 1) / rounds)
    return times


def in_turn(names: Mapping[str, object], number: int) -> Iterator[str]:
    """The names in an order of that round's own: nobody is always first, or always after the same.

    Rounds go forwards and backwards in turn, and each pair of them begins one name later.
    """
    order = list(names)
    first = number // 2 % len(order)
    order = order[first:] + order[:first]
    return iter(order if number % 2 == 0 else order[::-1])


def median_us(call: Call, times: int) -> float:
    """The median microseconds of one call."""
    taken = []
    for _ in range(times):
        began_at = perf_counter_ns()
        call()
        taken.append(perf_counter_ns() - began_at)
    return median(taken) / 1000
