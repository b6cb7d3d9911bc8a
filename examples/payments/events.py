"""Reads webhook events: the payment of each delivery, and the charges that are expected.

The expectations are computed from the file alone, independently of the ledger.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVENTS_FILE = Path(__file__).with_name("events.jsonl")


class EventsFileError(Exception):
    """The events file is not a file of webhook events, one JSON object a line."""


@dataclass(frozen=True)
class Payment:
    """The payment that an event requests: the keyword arguments of the `charge` task.

    It has only fields that are equal in all deliveries of an event. A delivery's number or time
    would make each redelivery the same key with other arguments.
    """

    event_id: str
    customer: str
    amount: int  # in cents
    currency: str


@dataclass(frozen=True)
class Delivery:
    """One delivery of an event to the endpoint; `line` is its line in the file, from 1."""

    line: int
    payment: Payment

    def __str__(self) -> str:
        return f"line {self.line}, {self.payment.event_id}"


class Deliveries(Sequence[Delivery]):
    """The deliveries of the file in order, and the charges that they should cause."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self._deliveries = tuple(deliveries)
        self.firsts: dict[str, Payment] = {}
        for delivery in self._deliveries:
            self.firsts.setdefault(delivery.payment.event_id, delivery.payment)

    def __getitem__(self, index: Any) -> Any:
        return self._deliveries[index]

    def __len__(self) -> int:
        return len(self._deliveries)

    def reuses_id(self, delivery: Delivery) -> bool:
        """Returns whether an earlier event has the same id and another payment."""
        return delivery.payment != self.firsts[delivery.payment.event_id]

    def totals(self) -> dict[str, int]:
        """Returns the cents to charge by currency: each event once, at its first amount."""
        totals: Counter[str] = Counter()
        for payment in self.firsts.values():
            totals[payment.currency] += payment.amount
        return dict(sorted(totals.items()))

    def event_to_interrupt(self, begin: int = 0) -> str:
        """Returns an event near the middle of the file, closely followed by its duplicate, or "".

        The duplicate arrives while the event is being charged, and the process is killed with other
        events before and after it.

        Args:
            begin: only events that are first delivered from this position on.
        """
        positions: dict[str, list[int]] = {}
        for position, delivery in enumerate(self):
            positions.setdefault(delivery.payment.event_id, []).append(position)

        def rank(event_id: str) -> tuple[int, int]:
            first, *duplicates = positions[event_id]
            gap = duplicates[0] - first if duplicates else len(self)
            return gap, abs(first - (begin + len(self)) // 2)

        return min(
            (event for event in positions if positions[event][0] >= begin), key=rank, default=""
        )

    def split_after(self, event_id: str, lines: int) -> tuple[Sequence[Delivery], ...]:
        """Splits the deliveries in three: after the first one of `event_id`, and `lines` later.

        The second part ends before any reuse of an id, because a reuse is published only after the
        first use has its reply.
        """
        first = next(n for n, sent in enumerate(self) if sent.payment.event_id == event_id)
        after = range(first + 1, min(first + 1 + lines, len(self)))
        split = next((n for n in after if self.reuses_id(self[n])), after.stop)
        return self[: first + 1], self[first + 1 : split], self[split:]


def read_deliveries(file: Path = EVENTS_FILE) -> Deliveries:
    """Returns the deliveries in `file`; raises an `EventsFileError` that names the cause."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EventsFileError(f"{file} cannot be read: {error}.") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise EventsFileError(f"{file} holds no events; write one JSON object a line.")
    return Deliveries([Delivery(number, _payment(line, file, number)) for number, line in numbered])


def _payment(line: str, file: Path, number: int) -> Payment:
    try:
        event = json.loads(line)
        payment = event["data"]["object"]
        return Payment(
            event_id=str(event["id"]),
            customer=str(payment["customer"]),
            amount=int(payment["amount"]),
            currency=str(payment["currency"]),
        )
    except json.JSONDecodeError as error:
        raise EventsFileError(f"{file}, line {number}: not JSON: {error}.") from error
    except (KeyError, TypeError, ValueError) as error:
        raise EventsFileError(
            f"{file}, line {number}: an event needs id and, in data.object, "
            f"customer, currency and a whole amount in cents; {error} is missing or wrong."
        ) from error
