"""A figure: what was measured, how far it spread, and what was asked of it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median, quantiles
from typing import Any


@dataclass(frozen=True)
class Spread:
    """The median of many, and their middle half."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The one of `values`; a single value spreads nowhere."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)

    @classmethod
    def of_ratios(cls, values: Sequence[float], units: Sequence[float]) -> Spread:
        """Round by round: what else the machine did in a round strikes both sides of a ratio."""
        return cls.of([value / unit for value, unit in zip(values, units, strict=True)])


@dataclass(frozen=True)
class Goal:
    """A bound that a figure must keep."""

    bound: float
    #: One of those that are compared below.
    sign: str = "≤"

    def is_met_by(self, value: float) -> bool:
        """By `value` as measured, not as printed."""
        compare = {"≤": operator.le, "<": operator.lt, "=": operator.eq, "≥": operator.ge}
        return bool(compare[self.sign](value, self.bound))


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    what: str
    value: float
    unit: str = ""
    goal: Goal | None = None
    spread: Spread | None = None

    @classmethod
    def spread_of(
        cls, what: str, spread: Spread, unit: str = "", goal: Goal | None = None
    ) -> Figure:
        """The median of `spread`, with the rest of it beside."""
        return cls(what, spread.middle, unit, goal, spread)

    @property
    def is_met(self) -> bool | None:
        """None where nothing was asked."""
        return None if self.goal is None else self.goal.is_met_by(self.value)

    @property
    def measured(self) -> str:
        """The value with its unit."""
        return with_unit(self.value, self.unit)

    def with_value(self, value: float) -> Figure:
        """The same of another run."""
        return replace(self, value=value)

    @property
    def around(self) -> str:
        """The middle half; nothing for a count."""
        if self.spread is None:
            return ""
        return f"{number(self.spread.low)}–{number(self.spread.high)}"

    @property
    def asked(self) -> str:
        """The goal with its unit."""
        if self.goal is None:
            return ""
        return f"{self.goal.sign} {with_unit(self.goal.bound, self.unit)}"


@dataclass(frozen=True)
class Bars:
    """For a plot: contestants beside each other."""

    title: str
    unit: str
    bars: dict[str, Spread]
    #: Those of this library.
    ours: Sequence[str] = ()


@dataclass(frozen=True)
class Curves:
    """For a plot: how something grows with something else."""

    title: str
    unit: str
    across: str
    curves: dict[str, list[tuple[float, Spread]]]
    #: Whether the numbers across are powers rather than steps.
    powers: bool = False


@dataclass(frozen=True)
class Finding:
    """What one measure has brought."""

    figures: list[Figure] = field(default_factory=list)
    plots: list[Bars | Curves] = field(default_factory=list)
    #: What the figures were made of.
    raw: dict[str, Any] = field(default_factory=dict)
    #: Why there are none, where that is so: what is missing here, or what broke.
    why_not: str = ""
    #: The traceback, where it broke.
    broken: str = ""

    def facts(self) -> dict[str, Any]:
        """For JSON; without the plots, which are made of the rest."""
        return {
            "figures": [{**asdict(each), "met": each.is_met} for each in self.figures],
            "raw": self.raw,
            "why_not": self.why_not,
        }


def number(value: float) -> str:
    """Three digits, or as many as there are before the point."""
    if value == round(value):
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def with_unit(value: float, unit: str) -> str:
    """As one writes it: 1.25 ×, 260 bytes, 8 µs."""
    return f"{number(value)} {unit}".rstrip()
