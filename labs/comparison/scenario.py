"""The base class of scenarios; each scenario is a row of the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from labs.comparison.contestants import OURS
from labs.comparison.environment import Environment


@dataclass(frozen=True)
class Cell:
    """The result of one contestant in one scenario."""

    #: For the table.
    text: str
    #: The details that `text` summarises.
    facts: dict[str, Any] = field(default_factory=dict)
    #: The traceback and the worker's output, if the scenario itself raised an error.
    failure: str = ""


class Scenario(ABC):
    """Contestants run it independently of each other."""

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

    @abstractmethod
    def measure(self, environment: Environment) -> Cell:
        """Runs the scenario; the worker of `environment` is running."""

    def is_met(self, cells: Mapping[str, Cell]) -> bool:
        """Whether celery-idempotent has the expected result; `cells` are by contestant."""
        return cells[OURS.name].text == self.expected
