"""A row of the table: one scenario, the same for every contestant."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.labs.comparison.contestants import OURS
from tests.labs.comparison.environment import Environment


@dataclass(frozen=True)
class Cell:
    """What came of one contestant in one row."""

    #: For the table.
    text: str
    #: What `text` was made of.
    facts: dict[str, Any] = field(default_factory=dict)
    #: Whether the scenario itself broke down.
    broken: bool = False


#: Seconds of each call, by entry.
Times = Mapping[str, Sequence[float]]


class Row(ABC):
    """What the rows have in common."""

    #: For ``--only``.
    name: ClassVar[str]
    #: For the table.
    title: ClassVar[str]
    #: What celery-idempotent must come to.
    asked: ClassVar[str]
    #: What every contestant's `Environment` takes.
    given: ClassVar[Mapping[str, Any]] = {}
    #: Whether no other row may run at the same time, because durations are compared.
    quiet: ClassVar[bool] = False

    def is_met(self, cells: Mapping[str, Cell]) -> bool:
        """Whether celery-idempotent came to what is asked, given the cells by contestant."""
        ours = cells[OURS.name]
        return not ours.broken and ours.text == self.asked


class Scenario(Row):
    """A row in which each contestant has an arena to itself, and all may go at the same time."""

    @abstractmethod
    def measure(self, environment: Environment) -> Cell:
        """Go through the scenario; the arena's worker runs."""


class Race(Row):
    """A row in which contestants take turns, because their durations are compared."""

    quiet = True
    #: Who runs, by entry: the contestant, and what its arena takes besides `given`.
    entries: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]]
    #: How often it is run, each time with new workers: one process is a little faster than another.
    heats: ClassVar[int] = 1

    @abstractmethod
    def run(self, arenas: Mapping[str, Environment]) -> Times:
        """Let the entries take turns."""

    @abstractmethod
    def measure(self, times: Times) -> dict[str, Cell]:
        """The cells by contestant, from the times of all heats."""
