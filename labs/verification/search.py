"""Breadth-first search of a scenario, which returns the shortest counterexample."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from labs.verification.environment import Environment, State, Violation
from labs.verification.model import Record


class Counterexample(NamedTuple):
    """A sequence of actions that breaks an invariant."""

    #: Each with the keys after it.
    steps: list[tuple[str, str]]
    violation: str


@dataclass(frozen=True)
class SearchResult:
    states: int
    transitions: int
    seconds: float
    counterexample: Counterexample | None
    #: Every state was visited, or a counterexample found.
    is_complete: bool = True


def search(environment: Environment, limit: int = 3_000_000) -> SearchResult:
    """Searches `environment` until an invariant breaks or every state has been visited.

    Liveness: from every state, an answer to every message is reachable without a further fault. In
    a finite graph, every fair run then gives one. A run is fair if it takes at some time each
    action that is possible again and again.

    Args:
        limit: states after which the search ends unfinished.
    """
    started_at = time.monotonic()
    gc.disable()  # the states are many tuples without cycles
    try:
        return _search(environment, limit, started_at)
    finally:
        gc.enable()


def _search(environment: Environment, limit: int, started_at: float) -> SearchResult:
    start = environment.start()
    index_of, states, parents = {start: 0}, [start], [0]
    goals: list[int] = []
    #: The states from which an action that is not a fault leads to this one.
    predecessors: list[list[int]] = [[]]
    transitions = current = 0

    def result(counterexample: Counterexample | None, is_complete: bool = True) -> SearchResult:
        seconds = time.monotonic() - started_at
        return SearchResult(len(states), transitions, seconds, counterexample, is_complete)

    while current < len(states):
        state = states[current]
        if environment.is_goal(state):
            goals.append(current)
        try:
            for transition in environment.transitions(state):
                transitions += 1
                target = index_of.setdefault(transition.state, len(states))
                if target == len(states):
                    states.append(transition.state)
                    parents.append(current)
                    predecessors.append([])
                if not transition.is_fault:
                    predecessors[target].append(current)
        except Violation as violation:
            path = _path(parents, current)
            return result(_trace(environment, [states[each] for each in path], str(violation)))
        current += 1
        if len(states) > limit:
            return result(None, is_complete=False)
    stuck = _first_stuck(predecessors, goals)
    if stuck is None:
        return result(None)
    path = _path(parents, stuck)
    violation = "a message is never answered, although no further fault happens"
    return result(_trace(environment, [states[each] for each in path], violation))


def _first_stuck(predecessors: list[list[int]], goals: list[int]) -> int | None:
    """Returns the first state from which no goal is reachable."""
    reaches_goal = bytearray(len(predecessors))
    pending = list(goals)
    for state in pending:
        reaches_goal[state] = 1
    while pending:
        for predecessor in predecessors[pending.pop()]:
            if not reaches_goal[predecessor]:
                reaches_goal[predecessor] = 1
                pending.append(predecessor)
    first = reaches_goal.find(0)
    return None if first < 0 else first


def _path(parents: list[int], end: int) -> list[int]:
    path = [end]
    while path[-1]:
        path.append(parents[path[-1]])
    return path[::-1]


def _trace(environment: Environment, path: list[State], violation: str) -> Counterexample:
    steps = []
    for state, target in itertools.pairwise(path):
        text = next(each.text for each in environment.transitions(state) if each.state == target)
        steps.append((text, _describe(target)))
    return Counterexample(steps, violation)


def format_counterexample(counterexample: Counterexample) -> Iterator[str]:
    """Yields a line for each step, with the keys after it."""
    for number, (text, keys) in enumerate(counterexample.steps, 1):
        yield f"{number:3}. {text:<62} {keys}"
    yield f"  ✗  {counterexample.violation}"


def _describe(state: State) -> str:
    """Returns the keys of a state: names, letters, tasks, and a + while a time has not passed."""
    parts = []
    for name, value in state.keys:
        if isinstance(value, Record):
            ahead = "+" if value.at > 1_000 else ""
            parts.append(f"{name}={value.letter}{ahead}:{value.task_id.decode()}")
        else:
            parts.append(f"{name}→{value.record}")
    return " ".join(parts)
