"""The base classes of scenarios; each scenario is a row of the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from labs.comparison.contestants import OURS
from labs.comparison.environment import Environment

#: The text of a cell whose contestant does not take part.
NOT_APPLICABLE = "–"


@dataclass(frozen=True)
class Cell:
    """The result of one contestant in one scenario."""

    #: For the table.
    text: str
    #: The details that `text` summarises.
    facts: dict[str, Any] = field(default_factory=dict)
    #: Whether the scenario itself raised an error.
    failed: bool = False


#: Seconds per call, by entry.
Times = Mapping[str, Sequence[float]]


class Scenario(ABC):
    """The common part of all scenarios."""

    #: For ``--only``.
    name: ClassVar[str]
    #: For the table.
    title: ClassVar[str]
    #: The result that celery-idempotent must have.
    expected: ClassVar[str]
    #: Arguments of every contestant's `Environment`.
    options: ClassVar[Mapping[str, Any]] = {}
    #: Whether it must run alone, because it compares durations.
    exclusive: ClassVar[bool] = False

    def is_met(self, cells: Mapping[str, Cell]) -> bool:
        """Whether celery-idempotent has the expected result; `cells` are by contestant."""
        ours = cells[OURS.name]
        return not ours.failed and ours.text == self.expected


class IndependentScenario(Scenario):
    """A scenario whose contestants run independently of each other."""

    @abstractmethod
    def measure(self, environment: Environment) -> Cell:
        """Runs the scenario; the worker of `environment` is running."""


class InterleavedScenario(Scenario):
    """A scenario that compares durations by interleaving the calls of its contestants."""

    exclusive = True
    #: By name: the contestant, and arguments of its environment in addition to `options`.
    entries: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]]
    #: Number of runs with new workers, because processes of the same program differ in speed.
    restarts: ClassVar[int] = 1

    @abstractmethod
    def run(self, environments: Mapping[str, Environment]) -> Times:
        """Times the interleaved calls of all entries."""

    @abstractmethod
    def measure(self, times: Times) -> dict[str, Cell]:
        """Returns the cells by contestant, from the times of all runs."""
