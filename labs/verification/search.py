"""Breadth-first search of an environment, which returns the shortest counterexample."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from labs.verification.environment import Environment
from labs.verification.model import FAILED, SETTLED
from labs.verification.state import (
    LETTERS,
    NO_RESULT,
    NO_SUCCESS,
    UNRECORDED,
    State,
    Violation,
)


class Counterexample(NamedTuple):
    """A sequence of actions that breaks an invariant."""

    #: Each with the record after it.
    steps: list[tuple[str, str]]
    last: str
    violation: str


@dataclass(frozen=True)
class SearchResult:
    states: int
    transitions: int
    #: The longest of the shortest paths to a state.
    depth: int
    seconds: float
    counterexample: Counterexample | None


def search(
    environment: Environment, progress: Callable[[int], None] = lambda states: None
) -> SearchResult:
    """Searches `environment` until an invariant breaks or every state has been visited.

    Liveness: from every state, an answer for every caller is reachable without a further fault. In
    a finite graph, every fair run then gives one. A run is fair if it takes at some time each
    action that is possible again and again.
    """
    started_at = time.monotonic()
    gc.disable()  # the states are many tuples without cycles
    try:
        return _search(environment, progress, started_at)
    finally:
        gc.enable()


def _search(
    environment: Environment, progress: Callable[[int], None], started_at: float
) -> SearchResult:
    start = environment.start()
    index_of = {start: 0}
    states = [start]
    parents = [0]
    depth = [0]
    goals = []
    #: The states from which an action that is not a fault leads to this one.
    predecessors: list[list[int]] = [[]]
    transitions = 0

    def result(counterexample: Counterexample | None) -> SearchResult:
        seconds = time.monotonic() - started_at
        return SearchResult(len(states), transitions, depth[-1], seconds, counterexample)

    current = 0
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
                    depth.append(depth[current] + 1)
                    predecessors.append([])
                if not transition.fault:
                    predecessors[target].append(current)
        except Violation as violation:
            last, reason = violation.args
            return result(_trace(environment, states, parents, current, last, reason))
        current += 1
        if current % 1000 == 0:
            progress(current)
    stuck = _first_stuck(predecessors, goals)
    if stuck is None:
        return result(None)
    last, reason = "and so on, for ever", "no outcome is reachable any more"
    return result(_trace(environment, states, parents, stuck, last, reason))


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


def _trace(
    environment: Environment, states: list[State], parents: list[int], end: int, last: str,
    reason: str,
) -> Counterexample:  # fmt: skip
    path = [end]
    while path[-1]:
        path.append(parents[path[-1]])
    path.reverse()
    steps = []
    names = _Names()
    for current, target in pairwise(path):
        transition = next(
            each
            for each in environment.transitions(states[current])
            if each.state == states[target]
        )
        text = names.translate(transition.text)
        names.rename(transition.renamed)
        steps.append((text, names.translate(_describe(transition.state))))
    return Counterexample(steps, names.translate(last), reason)


class _Names:
    """The names of executions in a trace: each state has its own letters for them."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.unused = iter(LETTERS.decode())

    def translate(self, text: str) -> str:
        """Returns `text` with the trace's names instead of the state's letters."""
        return re.sub(r"\b[A-Z]\b", lambda letter: self.name(letter[0]), text)

    def name(self, letter: str) -> str:
        if letter not in self.names:
            self.names[letter] = next(self.unused)
        return self.names[letter]

    def rename(self, renamed: bytes) -> None:
        """Adopts the letters of the next state."""
        pairs = zip(LETTERS, renamed, strict=False)
        self.names = {chr(new): self.name(chr(old)) for new, old in pairs}


def format_counterexample(counterexample: Counterexample) -> Iterator[str]:
    """Yields a line for each step, with the record after it."""
    for number, (text, record) in enumerate(counterexample.steps, 1):
        yield f"{number:3}. {text:<62} {record}"
    yield f"{len(counterexample.steps) + 1:3}. {counterexample.last}"
    yield f"  ✗  {counterexample.violation}"


def _describe(state: State) -> str:
    parts = [_describe_record(state)]
    for number, entry in enumerate(state.entries, 1):
        if entry is not None:
            what = "an error" if SETTLED[entry.state] == FAILED else "a duplicate"
            sent = f"sends, for {entry.until}" if entry.sending else "has sent"
            parts.append(f"entry of T{number}: {what}; {entry.owner.decode()} {sent}")
    for number, result in enumerate(state.results, 1):
        if result != NO_RESULT:
            text = {NO_SUCCESS: "no SUCCESS", UNRECORDED: "a SUCCESS without a record"}
            parts.append(f"T{number} has {text.get(result, f'SUCCESS {result.decode()}')}")
    return "; ".join(parts)


def _describe_record(state: State) -> str:
    record = state.record
    if record is None:
        return "absent"
    execution = record.worker.decode().removeprefix("w") or "nobody"
    task = record.task_id.decode()
    lease = f"for {record.at}" if record.at > 0 else "expired"
    return {
        "R": f"RESERVED for {task}, {lease}",
        "S": f"STARTED by {execution} ({task}), attempt {record.attempt}, {lease}",
        "C": f"COMPLETED by {record.body.decode()}",
        "P": f"COMPLETED by {record.body.decode()}, {record.owner.decode()} sends what follows",
    }.get(record.state, f"FAILED: {record.body.decode()}")
