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
    """The verdicts on all runs."""

    verdicts: Verdicts

    def markdown(self) -> str:
        """Returns the comparison of contestants and the tables of seeds."""
        return "\n\n".join([setting(), self._comparison(), *self._seeds()])

    def _comparison(self) -> str:
        columns = {
            f"{each.name} {each.version}{', effects in PostgreSQL' if transaction else ''}": found
            for each in CONTESTANTS
            for transaction in (False, True)
            if (found := self._of(each.name, transaction))
        }
        lines = [
            [title, *(summarize(verdicts) for verdicts in columns.values())]
            for title, summarize in _SUMMARIES
            if title != _VERSIONS or any(each.orders_of_both is not None for each in self.verdicts)
        ]
        return markdown(["", *columns], lines)

    def _seeds(self) -> Iterator[str]:
        """Yields a table for each variant of celery-idempotent."""
        for transaction in (False, True):
            if verdicts := self._of(OURS.name, transaction):
                yield markdown(
                    ["seed", "broker, store, workers", *_COLUMNS, "duration", ""],
                    [
                        [
                            f"{verdict.seed}",
                            verdict.shape,
                            *(summarize([verdict]) for summarize in _COLUMNS.values()),
                            f"{verdict.seconds:.0f} s",
                            MET if verdict.keeps_promises else MISSED,
                        ]
                        for verdict in sorted(verdicts, key=lambda each: each.seed)
                    ],
                )

    def _of(self, contestant: str, transaction: bool) -> Verdicts:
        return [
            each
            for each in self.verdicts
            if (each.contestant, each.transaction) == (contestant, transaction)
        ]


def _sum(*names: str) -> Callable[[Verdicts], str]:
    return lambda verdicts: " / ".join(
        f"{sum(getattr(verdict, name) for verdict in verdicts):,}" for name in names
    )


def _is_ours(verdicts: Verdicts) -> bool:
    return all(verdict.contestant == OURS.name for verdict in verdicts)


def _duplicates(verdicts: Verdicts) -> str:
    reasons = sum((Counter(verdict.duplicates) for verdict in verdicts), Counter[str]())
    if not reasons or not _is_ours(verdicts):
        return f"{reasons.total():,}"
    named = ", ".join(f"{number} {reason}" for reason, number in reasons.most_common())
    return f"{reasons.total():,}: {named}"


def _late(verdicts: Verdicts) -> str:
    names = sum((Counter(verdict.late) for verdict in verdicts), Counter[str]())
    named = ", ".join(f"{number} {name}" for name, number in sorted(names.items()))
    return f"{names.total():,}: {named}" if names else "–"


def _completed_twice(verdicts: Verdicts) -> str:
    return _sum("completed_twice")(verdicts) if _is_ours(verdicts) else "–"


def _stale(verdicts: Verdicts) -> str:
    if any(verdict.transaction for verdict in verdicts):
        return "–"
    rejected = _sum("stale_rejected")(verdicts) if _is_ours(verdicts) else "no token"
    return f"{rejected} / {_sum('stale_accepted')(verdicts)}"


def _recovery(verdicts: Verdicts) -> str:
    values = [seconds for verdict in verdicts for seconds in verdict.recovery]
    return f"{median(values):.2f} s, {max(values):.1f} s" if values else "–"


def _delay(verdicts: Verdicts) -> str:
    middle = median(verdict.median_delay for verdict in verdicts)
    return f"{middle:.1f} s, {max(verdict.longest_delay for verdict in verdicts):.1f} s"


#: Of the tables of seeds.
_COLUMNS: dict[str, Callable[[Verdicts], str]] = {
    "calls": _sum("calls"),
    "faults": _sum("faults"),
    "executions": _sum("executions"),
    "lost": _sum("lost"),
    "duplicate effects": _sum("orders_with_duplicates"),
    "stale writes rejected / accepted": _stale,
    "outcomes differ": _sum("differing"),
    "recovery after a fault: median, longest": _recovery,
}
_VERSIONS = "executions by the other version / orders whose messages reached both"
_SUMMARIES: tuple[tuple[str, Callable[[Verdicts], str]], ...] = (
    ("seeds", lambda verdicts: f"{len(verdicts)}"),
    ("calls / orders", _sum("calls", "orders")),
    ("faults injected", _sum("faults")),
    ("packets delivered late", _late),
    ("executions", _sum("executions")),
    (_VERSIONS, _sum("executions_of_previous", "orders_of_both")),
    ("orders lost", _sum("lost")),
    (
        "callers without a result / lost by the broker's transport",
        _sum("unanswered", "lost_by_broker"),
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
