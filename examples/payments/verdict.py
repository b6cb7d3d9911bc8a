"""Checks that each event was charged exactly once, from the events, the ledger and the replies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from celery_idempotent import KeyReusedError

from .events import Deliveries
from .kill import Kill
from .ledger import Charge
from .publisher import Reply


@dataclass(frozen=True)
class Evidence:
    """The results of a run."""

    deliveries: Deliveries
    replies: list[Reply]
    charges: list[Charge]
    signals: Counter[str]
    kill: Kill
    recovery_seconds: float | None
    seconds: float
    #: In shadow: the task ids of the calls that would not have run. None if not in shadow.
    preventable: list[str] | None = None
    #: The kill between the COMMIT of a charge and its completion. None in shadow.
    kill_after_commit: Kill | None = None

    @cached_property
    def charges_by_event(self) -> dict[str, list[Charge]]:
        """The charges of each event, oldest first."""
        by_event: dict[str, list[Charge]] = defaultdict(list)
        for charge in self.charges:
            by_event[charge.payment.event_id].append(charge)
        return dict(by_event)

    @cached_property
    def charged_again(self) -> dict[str, list[Charge]]:
        """Events with more than one charge."""
        return {event: rows for event, rows in self.charges_by_event.items() if len(rows) > 1}

    @cached_property
    def charges_of_killed_message(self) -> int:
        """Charges by the message whose first execution was killed after its COMMIT."""
        if self.kill_after_commit is None:
            return 0
        charges = self.charges_by_event[self.kill_after_commit.event_id]
        return sum(charge.task_id == charges[0].task_id for charge in charges)

    @cached_property
    def double_charges(self) -> int:
        """Charges beyond the first of each event."""
        return len(self.charges) - len(self.charges_by_event)

    @cached_property
    def ledger_totals(self) -> dict[str, int]:
        """Cents charged, by currency."""
        totals: Counter[str] = Counter()
        for charge in self.charges:
            totals[charge.payment.currency] += charge.payment.amount
        return dict(sorted(totals.items()))

    @cached_property
    def reuses(self) -> list[Reply]:
        """Replies to deliveries with a known event id and another payment."""
        return [reply for reply in self.replies if self.deliveries.reuses_id(reply.delivery)]

    @cached_property
    def rejected(self) -> list[Reply]:
        """The reuses that were rejected."""
        return [reuse for reuse in self.reuses if isinstance(reuse.outcome, KeyReusedError)]


def differences(evidence: Evidence) -> list[str]:
    """Returns how the run differs from one charge for each event, in one sentence each.

    In shadow, the charges that would have been prevented are only counted.
    """
    if evidence.preventable is not None:
        return list(_wrong_counts(evidence, evidence.preventable))
    return [
        *_wrong_charges(evidence),
        *_wrong_totals(evidence),
        *_wrong_replies(evidence),
    ]


def _wrong_counts(evidence: Evidence, preventable: list[str]) -> Iterator[str]:
    if len(preventable) != evidence.double_charges:
        yield (
            f"{len(preventable)} charges would have been prevented, but the ledger has "
            f"{evidence.double_charges} double ones."
        )
    prevented = set(preventable)
    others = [charge for charge in evidence.charges if charge.task_id not in prevented]
    rest = replace(evidence, charges=others)
    yield from (f"Without those: {sentence}" for sentence in _wrong_charges(rest))
    yield from (f"Without those: {sentence}" for sentence in _wrong_totals(rest))


def _wrong_charges(evidence: Evidence) -> Iterator[str]:
    firsts = evidence.deliveries.firsts
    charged = evidence.charges_by_event
    if again := evidence.charged_again:
        event, rows = max(again.items(), key=lambda item: len(item[1]))
        yield f"{_were(again, 'event')} charged more than once: {event} {len(rows)} times."
    if missing := [event for event in firsts if event not in charged]:
        yield f"{_were(missing, 'event')} never charged: {missing[0]}."
    for event, rows in charged.items():
        if rows[0].payment != firsts.get(event):
            yield f"{event} was not charged as in its first delivery."


def _wrong_totals(evidence: Evidence) -> Iterator[str]:
    expected, ledger = evidence.deliveries.totals(), evidence.ledger_totals
    surplus = {
        currency: ledger.get(currency, 0) - expected.get(currency, 0)
        for currency in sorted(expected.keys() | ledger.keys())
    }
    for sign, word in ((1, "much"), (-1, "little")):
        sums = [
            money(abs(cents), currency) for currency, cents in surplus.items() if cents * sign > 0
        ]
        if sums:
            yield f"The ledger holds {' and '.join(sums)} too {word}."


def _wrong_replies(evidence: Evidence) -> Iterator[str]:
    accepted = [reply for reply in evidence.reuses if reply not in evidence.rejected]
    if accepted:
        yield (
            f"{_were(accepted, 'delivery', 'deliveries')} accepted with a known id "
            f"and other arguments: {accepted[0].delivery}."
        )

    first_receipts: dict[str, Any] = {}
    failed: list[Reply] = []
    unequal: list[Reply] = []
    for reply in evidence.replies:
        if evidence.deliveries.reuses_id(reply.delivery):
            continue
        if isinstance(reply.outcome, Exception):
            failed.append(reply)
        elif reply.outcome != first_receipts.setdefault(reply.event_id, reply.outcome):
            unequal.append(reply)
    if failed:
        yield (
            f"{_were(failed, 'caller')} left without a receipt: "
            f"{failed[0].delivery} got {failed[0].outcome!r}."
        )
    if unequal:
        yield (
            f"{_were(unequal, 'caller')} given another receipt than the first caller: "
            f"{unequal[0].delivery}."
        )


def _were(things: Collection[object], noun: str, plural: str = "") -> str:
    return f"1 {noun} was" if len(things) == 1 else f"{len(things)} {plural or noun + 's'} were"


def money(cents: int, currency: str) -> str:
    """Formats an amount: ``1,234.50 EUR``."""
    return f"{cents / 100:,.2f} {currency.upper()}"
