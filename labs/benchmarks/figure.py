"""Figures: a measured value, its spread and its goal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles


@dataclass(frozen=True)
class Spread:
    """The median and the interquartile range of several values."""

    median: float
    low: float
    high: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of `values`; that of a single value is empty."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)

    @classmethod
    def from_ratios(cls, values: Sequence[float], units: Sequence[float]) -> Spread:
        """Returns the spread of the ratios within each round.

        Background load in a round affects both sides of its ratio.
        """
        return cls.from_values([value / unit for value, unit in zip(values, units, strict=True)])


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    label: str
    value: float
    unit: str = ""
    #: The largest value that is good enough.
    goal: float | None = None
    spread: Spread | None = None

    @classmethod
    def from_spread(
        cls, label: str, spread: Spread, unit: str = "", goal: float | None = None
    ) -> Figure:
        """Returns a figure whose value is the median of `spread`."""
        return cls(label, spread.median, unit, goal, spread)

    @property
    def is_met(self) -> bool | None:
        """None if the figure has no goal."""
        return None if self.goal is None else self.value <= self.goal

    @property
    def measured(self) -> str:
        """The value with its unit."""
        return with_unit(self.value, self.unit)

    @property
    def interval(self) -> str:
        """The interquartile range; empty for a count."""
        if self.spread is None:
            return ""
        return f"{format_number(self.spread.low)}–{format_number(self.spread.high)}"

    @property
    def goal_text(self) -> str:
        """The goal with its unit."""
        if self.goal is None:
            return ""
        return f"≤ {with_unit(self.goal, self.unit)}"


@dataclass(frozen=True)
class Cost:
    """One line of the table of what a task costs."""

    label: str
    unit: str
    celery: float
    ours: float
    #: The difference within each round.
    more: Spread
    unfused: float | None = None

    @property
    def cells(self) -> list[str]:
        """The line, see `COST_HEADINGS`."""
        sign = "+" if self.more.median >= 0 else "−"
        more = sign + with_unit(abs(self.more.median), self.unit)
        values = (self.celery, self.ours, self.unfused)
        celery, ours, unfused = (
            "" if value is None else with_unit(value, self.unit) for value in values
        )
        return [self.label, celery, ours, more, unfused]


COST_HEADINGS = ["", "celery", "celery-idempotent", "difference", "without fused completion"]


@dataclass(frozen=True)
class MeasureResult:
    """The figures of one measure."""

    figures: list[Figure] = field(default_factory=list)
    #: For the table at the top of the page.
    costs: list[Cost] = field(default_factory=list)
    #: Why there are no figures: a timeout or a traceback.
    failure: str = ""


def format_number(value: float) -> str:
    """Formats `value` with three significant digits, or all digits of its integral part."""
    if value == round(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def with_unit(value: float, unit: str) -> str:
    """Formats a value with its unit: 1.25 ×, 260 bytes, 8 µs."""
    return f"{format_number(value)} {unit}".rstrip()
