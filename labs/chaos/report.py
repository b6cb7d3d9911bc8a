"""The tables of all runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from labs.chaos.verdict import Verdict
from labs.comparison.contestants import CONTESTANTS, OURS
from labs.rig.report import MET, MISSED, markdown, setting

Verdicts = Sequence[Verdict]


@dataclass(frozen=True)
class Report:
    """The verdicts on all runs.

    Args:
        server: flavour and version.
        seconds: the duration of all runs.
    """

    verdicts: Verdicts
    server: str
    seconds: float

    def broken_promises(self) -> list[Verdict]:
        """Returns the runs in which celery-idempotent broke a promise."""
        return [
            verdict
            for transaction in (False, True)
            for verdict in self._of(OURS.name, transaction)
            if not verdict.keeps_promises
        ]

    def markdown(self) -> str:
        """Returns the comparison of contestants and the table of seeds."""
        tables = [markdown(*content) for content in self._contents()]
        return "\n\n".join([setting(self.server), *tables])

    def _of(self, contestant: str, transaction: bool = False) -> Verdicts:
        return [
            verdict
            for verdict in self.verdicts
            if (verdict.contestant, verdict.transaction) == (contestant, transaction)
        ]

    def _columns(self) -> dict[str, Verdicts]:
        return {
            f"{each.name} {each.version}{', effects in PostgreSQL' if transaction else ''}": found
            for each in CONTESTANTS
            for transaction in (False, True)
            if (found := self._of(each.name, transaction))
        }

    def _contents(self) -> Iterator[tuple[Sequence[str], list[list[str]]]]:
        """Yields headings and lines of the comparison, and of the seeds of each variant."""
        columns = self._columns()
        lines = [
            [title, *(summarize(verdicts) for verdicts in columns.values())]
            for title, summarize in _SUMMARIES
            if title != _VERSIONS or any(each.orders_of_both is not None for each in self.verdicts)
        ]
        yield ["", *columns], lines
        for transaction in (False, True):
            if verdicts := self._of(OURS.name, transaction):
                yield _SEED, self._seeds(verdicts)

    @staticmethod
    def _seeds(verdicts: Verdicts) -> list[list[str]]:
        return [
            [
                f"{verdict.seed}",
                verdict.shape,
                f"{verdict.calls}",
                f"{verdict.faults}",
                f"{verdict.executions}",
                f"{verdict.lost}",
                f"{verdict.orders_with_duplicates}",
                *_stale_of(verdict),
                f"{verdict.differing}",
                _seconds(verdict.recovery),
                f"{verdict.seconds:.0f} s",
                MET if verdict.keeps_promises else MISSED,
            ]
            for verdict in sorted(verdicts, key=lambda each: each.seed)
        ]


_SEED = [
    "seed",
    "broker, store, workers",
    "calls",
    "faults",
    "executions",
    "lost",
    "duplicate effects",
    "stale writes rejected",
    "… accepted",
    "outcomes differ",
    "recovery after a fault: median, longest",
    "duration",
    "",
]


def _sum(name: str) -> Callable[[Verdicts], str]:
    return lambda verdicts: f"{sum(getattr(verdict, name) for verdict in verdicts):,}"


def _both(first: str, second: str) -> Callable[[Verdicts], str]:
    return lambda verdicts: f"{_sum(first)(verdicts)} / {_sum(second)(verdicts)}"


def _duplicates(verdicts: Verdicts) -> str:
    reasons: Counter[str] = Counter()
    for verdict in verdicts:
        reasons.update(verdict.duplicates)
    text = f"{reasons.total():,}"
    if reasons and all(verdict.contestant == OURS.name for verdict in verdicts):
        text += ": " + ", ".join(f"{number} {reason}" for reason, number in reasons.most_common())
    return text


def _late(verdicts: Verdicts) -> str:
    names: Counter[str] = Counter()
    for verdict in verdicts:
        names.update(verdict.late)
    return (
        f"{names.total():,}: " + ", ".join(f"{names[name]} {name}" for name in sorted(names))
        if names
        else "–"
    )


def _completed_twice(verdicts: Verdicts) -> str:
    known = all(verdict.contestant == OURS.name for verdict in verdicts)
    return _sum("completed_twice")(verdicts) if known else "–"


def _stale_of(verdict: Verdict) -> tuple[str, str]:
    if verdict.transaction:
        return "–", "–"
    return f"{verdict.stale_rejected}", f"{verdict.stale_accepted}"


def _stale(verdicts: Verdicts) -> str:
    if any(verdict.transaction for verdict in verdicts):
        return "–"
    rejected = _sum("stale_rejected")(verdicts)
    if any(verdict.contestant != OURS.name for verdict in verdicts):
        rejected = "no token"
    return f"{rejected} / {_sum('stale_accepted')(verdicts)}"


def _recovery(verdicts: Verdicts) -> str:
    return _seconds([seconds for verdict in verdicts for seconds in verdict.recovery])


def _delay(verdicts: Verdicts) -> str:
    middle = median(verdict.median_delay for verdict in verdicts)
    return f"{middle:.1f} s, {max(verdict.longest_delay for verdict in verdicts):.1f} s"


def _seconds(values: Sequence[float]) -> str:
    return f"{median(values):.2f} s, {max(values):.1f} s" if values else "–"


_VERSIONS = "executions by the other version / orders whose messages reached both"
_SUMMARIES: tuple[tuple[str, Callable[[Verdicts], str]], ...] = (
    ("seeds", lambda verdicts: f"{len(verdicts)}"),
    ("calls / orders", _both("calls", "orders")),
    ("faults injected", _sum("faults")),
    ("packets delivered late", _late),
    ("executions", _sum("executions")),
    (_VERSIONS, _both("executions_of_previous", "orders_of_both")),
    ("orders lost", _sum("lost")),
    (
        "callers without a result / lost by the broker's transport",
        _both("unanswered", "lost_by_broker"),
    ),
    ("calls rejected", _sum("rejected")),
    ("orders with duplicate effects", _duplicates),
    ("orders completed twice", _completed_twice),
    ("stale writes rejected / accepted downstream", _stale),
    ("orders whose callers got different outcomes", _sum("differing")),
    ("orders whose downstream state differs from their outcome", _sum("disagreeing")),
    ("recovery after a fault: median, longest", _recovery),
    ("from call to result: median, longest", _delay),
)
