"""Breadth first through every state of a world, and the shortest way to whatever is wrong."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tests.labs.verification.environment import Runtime
from tests.labs.verification.state import LETTERS, State, Violation


class ScannedRecord(NamedTuple):
    """A counterexample: what happens, step by step, and what is wrong then."""

    #: Each with the record that is there afterwards.
    steps: list[tuple[str, str]]
    last: str
    wrong: str


@dataclass(frozen=True)
class Searched:
    """What a search has seen."""

    states: int
    moves: int
    #: The longest of the shortest ways to a state.
    depth: int
    seconds: float
    found: ScannedRecord | None


def search(world: Runtime, progress: Callable[[int], None] = lambda states: None) -> Searched:
    """Search `world` until an invariant breaks or nothing is left.

    Liveness: from every state an answer for every caller is reachable without any further fault. In
    a finite graph that is the same as: no fair run goes without one, fair meaning that a step which
    is possible again and again is taken some time.
    """
    began_at = time.monotonic()
    gc.disable()  # states are tuples without cycles, and many
    try:
        return _search(world, progress, began_at)
    finally:
        gc.enable()


def _search(world: Runtime, progress: Callable[[int], None], began_at: float) -> Searched:
    start = world.start()
    number = {start: 0}
    states = [start]
    came_from = [0]
    depth = [0]
    goals = []
    #: Who leads here without a fault.
    leads: list[list[int]] = [[]]
    moves = 0

    def searched(found: ScannedRecord | None) -> Searched:
        return Searched(len(states), moves, depth[-1], time.monotonic() - began_at, found)

    here = 0
    while here < len(states):
        state = states[here]
        if world.is_goal(state):
            goals.append(here)
        try:
            for move in world.moves(state):
                moves += 1
                there = number.setdefault(move.state, len(states))
                if there == len(states):
                    states.append(move.state)
                    came_from.append(here)
                    depth.append(depth[here] + 1)
                    leads.append([])
                if not move.fault:
                    leads[there].append(here)
        except Violation as violation:
            last, wrong = violation.args
            return searched(_story(world, states, came_from, here, last, wrong))
        here += 1
        if here % 1000 == 0:
            progress(here)
    stuck = _stuck(leads, goals)
    if stuck is None:
        return searched(None)
    last, wrong = "and so on, for ever", "no outcome can be reached any more"
    return searched(_story(world, states, came_from, stuck, last, wrong))


def _stuck(leads: list[list[int]], goals: list[int]) -> int | None:
    """The first state from which no goal can be reached."""
    hopeful = bytearray(len(leads))
    waiting = list(goals)
    for state in waiting:
        hopeful[state] = 1
    while waiting:
        for before in leads[waiting.pop()]:
            if not hopeful[before]:
                hopeful[before] = 1
                waiting.append(before)
    first = hopeful.find(0)
    return None if first < 0 else first


def _story(
    world: Runtime, states: list[State], came_from: list[int], end: int, last: str, wrong: str
) -> ScannedRecord:
    path = [end]
    while path[-1]:
        path.append(came_from[path[-1]])
    path.reverse()
    steps = []
    names = _Names()
    for here, there in pairwise(path):
        move = next(move for move in world.moves(states[here]) if move.state == states[there])
        text = names.told(move.text)
        names.renamed(move.met)
        steps.append((text, names.told(_record(move.state))))
    return ScannedRecord(steps, names.told(last), wrong)


class _Names:
    """What the executions are called in a story: each state has letters of its own for them."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.unused = iter(LETTERS.decode())

    def told(self, text: str) -> str:
        """`text` with the story's names for the state's."""
        return re.sub(r"\b[A-Z]\b", lambda letter: self.name(letter[0]), text)

    def name(self, letter: str) -> str:
        if letter not in self.names:
            self.names[letter] = next(self.unused)
        return self.names[letter]

    def renamed(self, met: bytes) -> None:
        """The state's letters are others now."""
        self.names = {chr(new): self.name(chr(old)) for new, old in zip(LETTERS, met, strict=False)}


def told(found: ScannedRecord) -> Iterator[str]:
    """A counterexample, a line a step, each with the record that is there then."""
    for number, (text, record) in enumerate(found.steps, 1):
        yield f"{number:3}. {text:<62} {record}"
    yield f"{len(found.steps) + 1:3}. {found.last}"
    yield f"  ✗  {found.wrong}"


def _record(state: State) -> str:
    there = state.record
    if there is None:
        return "absent"
    execution_id = there.worker.decode().removeprefix("w") or "nobody"
    task = there.task_id.decode()
    lasts = f"for {there.at}" if there.at > 0 else "over"
    return {
        "R": f"RESERVED for {task}, {lasts}",
        "E": "absent, but for the errors of "
        + ", ".join(error.task_id.decode() for error in there.errors),
        "S": f"STARTED by {execution_id} ({task}), attempt {there.attempt}, {lasts}",
        "C": f"COMPLETED by {there.body.decode()}",
        "D": f"COMPLETED by {there.body.decode()}, continued",
    }.get(there.state, f"FAILED: {there.body.decode()}")
