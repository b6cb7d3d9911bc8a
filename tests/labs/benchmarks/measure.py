"""A measure: one question, and what is asked of the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from tests.labs.benchmarks.figure import Finding

#: Told how much is done, from 0 to 1.
Show = Callable[[float], object]


class Measure(ABC):
    """What the measures have in common; each is small enough to be read beside its goal."""

    #: For ``--only``.
    name: ClassVar[str]
    #: For the table.
    title: ClassVar[str]
    #: The page that tells of it, in docs/.
    page: ClassVar[str] = "benchmarks"
    #: Whether it counts. Counts are the same on a busy machine.
    counts: ClassVar[bool] = False
    #: Seconds after which it is given up.
    timeout: ClassVar[float] = 180.0

    @abstractmethod
    def measure(self, show: Show) -> Finding:
        """Start what it needs, let contestants take turns, and say what came of it.

        Raises:
            Missing: if something that it needs is not here.
        """


class Missing(Exception):
    """Something that a measure needs is not on this machine; says what, and how to have it."""
