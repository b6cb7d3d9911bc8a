"""The tables: on a terminal, and as Markdown."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median

from rich.table import Table

from tests.labs.chaos.verdict import Disposition
from tests.labs.comparison.contestants import CONTESTANTS, OURS, PLAIN, find_contestant

MET, MISSED = "✓", "✗"

Verdicts = Sequence[Disposition]


@dataclass(frozen=True)
class Report:
    """What all runs have brought.

    Args:
        server: flavour and version.
        seconds: that it took.
    """

    verdicts: Verdicts
    server: str
    seconds: float

    def faulty(self) -> list[Disposition]:
        """Runs of celery-idempotent that did what it promises not to do."""
        return [verdict for verdict in self._of(OURS.name) if not verdict.faultless]

    def telling(self) -> int | None:
        """The seed in which most is to be seen; one that all have played, if there is any."""
        ours = self._of(OURS.name)
        shared = [v for v in ours if any(v.seed == w.seed for w in self._of(PLAIN.name))] or ours
        seen = max(shared, key=lambda v: (v.stale_refused, v.doubled_orders), default=None)
        return None if seen is None else seen.seed

    @property
    def setting(self) -> str:
        """Machine and versions, in a line."""
        libraries = ", ".join(f"{name} {version(name)}" for name in ("celery", "kombu", "redis"))
        return (
            f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}; "
            f"{self.server}; {libraries}"
        )

    def tables(self) -> list[Table]:
        """For a terminal: contestants side by side, then each seed."""
        tables = []
        for headings, lines in ((self._headings(), self._lines()), (_SEED, self._seeds())):
            table = Table(caption=self.setting)
            for number, heading in enumerate(headings):
                justify = "left" if number == 0 else "right"
                table.add_column(heading, justify=justify, overflow="fold")
            for line in lines:
                table.add_row(*line, style="bold red" if line[-1] == MISSED else "")
            tables.append(table)
        return tables

    def markdown(self) -> str:
        """For a document."""
        parts = []
        for headings, lines in ((self._headings(), self._lines()), (_SEED, self._seeds())):
            rows = [headings, ["---"] + ["--:"] * (len(headings) - 1), *lines]
            parts.append("\n".join("| " + " | ".join(row) + " |" for row in rows))
        return "\n\n".join(parts)

    def _of(self, contestant: str) -> Verdicts:
        return [verdict for verdict in self.verdicts if verdict.contestant == contestant]

    def _present(self) -> list[str]:
        return [each.name for each in CONTESTANTS if self._of(each.name)]

    def _headings(self) -> list[str]:
        return ["", *(f"{name} {find_contestant(name).version}" for name in self._present())]

    def _lines(self) -> list[list[str]]:
        return [
            [title, *(tell(self._of(name)) for name in self._present())]
            for title, tell in _MEASURES
        ]

    def _seeds(self) -> list[list[str]]:
        return [
            [
                f"{verdict.seed}",
                verdict.shape,
                f"{verdict.calls}",
                f"{verdict.faults}",
                f"{verdict.executions}",
                f"{verdict.lost}",
                f"{verdict.doubled_orders}",
                f"{verdict.stale_refused}",
                f"{verdict.stale_accepted}",
                f"{verdict.differing}",
                _seconds(verdict.recovery),
                f"{verdict.seconds:.0f} s",
                MET if verdict.faultless else MISSED,
            ]
            for verdict in self._of(OURS.name)
        ]


_SEED = [
    "seed",
    "broker, store, workers",
    "calls",
    "faults",
    "executions",
    "lost",
    "doubled",
    "stale writes refused",
    "… accepted",
    "outcomes differ",
    "back after a fault: median, longest",
    "took",
    "",
]


def _sum(name: str) -> Callable[[Verdicts], str]:
    return lambda verdicts: f"{sum(getattr(verdict, name) for verdict in verdicts):,}"


def _both(one: str, other: str) -> Callable[[Verdicts], str]:
    return lambda verdicts: f"{_sum(one)(verdicts)} / {_sum(other)(verdicts)}"


def _doubled(verdicts: Verdicts) -> str:
    reasons: Counter[str] = Counter()
    for verdict in verdicts:
        reasons.update(verdict.doubled)
    text = f"{reasons.total():,}"
    if reasons and all(verdict.contestant == OURS.name for verdict in verdicts):
        text += ": " + ", ".join(f"{number} {reason}" for reason, number in reasons.most_common())
    return text


def _completed_twice(verdicts: Verdicts) -> str:
    known = all(verdict.contestant == OURS.name for verdict in verdicts)
    return _sum("completed_twice")(verdicts) if known else "–"


def _stale(verdicts: Verdicts) -> str:
    refused = _sum("stale_refused")(verdicts)
    if any(verdict.contestant != OURS.name for verdict in verdicts):
        refused = "no token"
    return f"{refused} / {_sum('stale_accepted')(verdicts)}"


def _recovered(verdicts: Verdicts) -> str:
    return _seconds([seconds for verdict in verdicts for seconds in verdict.recovery])


def _delay(verdicts: Verdicts) -> str:
    middle = median(verdict.median_delay for verdict in verdicts)
    return f"{middle:.1f} s, {max(verdict.longest_delay for verdict in verdicts):.1f} s"


def _seconds(each: Sequence[float]) -> str:
    return f"{median(each):.2f} s, {max(each):.1f} s" if each else "–"


_MEASURES: tuple[tuple[str, Callable[[Verdicts], str]], ...] = (
    ("seeds", lambda verdicts: f"{len(verdicts)}"),
    ("calls / orders", _both("calls", "orders")),
    ("faults struck", _sum("faults")),
    ("executions", _sum("executions")),
    ("orders lost", _sum("lost")),
    (
        "callers without an answer / by the broker's transport",
        _both("unanswered", "lost_by_broker"),
    ),
    ("calls refused", _sum("refused")),
    ("orders with a doubled effect", _doubled),
    ("orders completed twice", _completed_twice),
    ("stale writes refused / accepted downstream", _stale),
    ("orders whose callers saw different outcomes", _sum("differing")),
    ("orders that are otherwise downstream than told", _sum("disagreeing")),
    ("back after a fault: median, longest", _recovered),
    ("from call to answer: median, longest", _delay),
)
