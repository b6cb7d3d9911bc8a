"""Read webhook events: which payment each delivery asks for, and what ought to come of them all.

Expectations come from the file alone, never from the ledger that they are held against.
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
    """The events file cannot be read as webhook envelopes, one JSON object a line."""


@dataclass(frozen=True)
class Payment:
    """What an event asks for; the keyword arguments of the `charge` task.

    Only what is the same in every copy of an event belongs here: a delivery's number or time would
    make each redelivery look like the same id with other arguments.
    """

    event_id: str
    customer: str
    amount: int  # in cents
    currency: str


@dataclass(frozen=True)
class Delivery:
    """One arrival of an event at our endpoint, `line` being its place in the file (from 1)."""

    line: int
    payment: Payment

    def __str__(self) -> str:
        return f"line {self.line}, {self.payment.event_id}"


class Deliveries(Sequence[Delivery]):
    """The file's lines in order, and what they amount to."""

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
        """Whether `delivery` bears the id of an earlier event and asks for something else."""
        return delivery.payment != self.firsts[delivery.payment.event_id]

    def totals(self) -> dict[str, int]:
        """Cents to be charged, by currency: each event once, at its first amount."""
        totals: Counter[str] = Counter()
        for payment in self.firsts.values():
            totals[payment.currency] += payment.amount
        return dict(sorted(totals.items()))

    def event_to_interrupt(self) -> str:
        """An event with a copy at its heels, close to the middle of the file.

        Its copy finds it running, and its process can be killed with work before and behind it.
        """
        places: dict[str, list[int]] = {}
        for place, delivery in enumerate(self):
            places.setdefault(delivery.payment.event_id, []).append(place)

        def unfitness(event_id: str) -> tuple[int, int]:
            first, *copies = places[event_id]
            gap = copies[0] - first if copies else len(self)
            return gap, abs(first - len(self) // 2)

        return min(places, key=unfitness)

    def split_behind(self, event_id: str, lines: int) -> tuple[Sequence[Delivery], ...]:
        """The file in two parts, the first going on for up to `lines` after `event_id` came.

        It ends before any reuse of an id, which has to wait until the first use is answered.
        """
        first = next(n for n, sent in enumerate(self) if sent.payment.event_id == event_id)
        behind = range(first + 1, min(first + 1 + lines, len(self)))
        split = next((n for n in behind if self.reuses_id(self[n])), behind.stop)
        return self[:split], self[split:]


def read_deliveries(file: Path = EVENTS_FILE) -> Deliveries:
    """Every delivery in `file`. Raises `EventsFileError`, naming the line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EventsFileError(f"{file} cannot be read: {error}.") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise EventsFileError(f"{file} holds no events.")
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
