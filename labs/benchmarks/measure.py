"""The base class of the measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from labs.benchmarks.figure import MeasureResult

#: The section of the page that has all measures of a run.
FIGURES = "figures"


class Measure(ABC):
    """One measurement with its goals; its docstring is published with its figures."""

    #: For ``--only``.
    name: ClassVar[str]
    #: For the table.
    title: ClassVar[str]
    #: The marked section of the page. Those of other sections than `FIGURES` run on request only.
    section: ClassVar[str] = FIGURES
    #: In seconds.
    timeout: ClassVar[float] = 180.0

    @abstractmethod
    def measure(self) -> MeasureResult:
        """Starts the servers that it needs, measures, and returns the result."""
