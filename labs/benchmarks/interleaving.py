"""Interleaves the calls of several contestants, so that background load affects all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from time import perf_counter_ns

Call = Callable[[], object]
#: The median of each round, by contestant.
Rounds = dict[str, list[float]]


def interleave(calls: Mapping[str, Call], rounds: int, calls_per_round: int) -> Rounds:
    """Times every call `calls_per_round` times in each of `rounds` rounds.

    Returns the median of each round in microseconds.
    """
    for call in calls.values():
        median_microseconds(call, calls_per_round)  # connects, loads scripts, fills caches
    times: Rounds = {name: [] for name in calls}
    for number in range(rounds):
        for name in round_order(calls, number):
            times[name].append(median_microseconds(calls[name], calls_per_round))
    return times


def round_order(names: Mapping[str, object], number: int) -> Iterator[str]:
    """Returns the names in the order of a round, so that no name is favoured.

    Rounds alternate between forwards and backwards; each pair of rounds starts one name later.
    """
    order = list(names)
    first = number // 2 % len(order)
    order = order[first:] + order[:first]
    return iter(order if number % 2 == 0 else order[::-1])


def median_microseconds(call: Call, times: int) -> float:
    """Returns the median duration of `call`."""
    durations = []
    for _ in range(times):
        started_at = perf_counter_ns()
        call()
        durations.append(perf_counter_ns() - started_at)
    return median(durations) / 1000
