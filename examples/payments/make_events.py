"""Generates `events.jsonl`: webhook deliveries of a payment provider, with many duplicates.

    python -m examples.payments.make_events > examples/payments/events.jsonl

Every line is one HTTP delivery, in order of arrival. Providers deliver at least once, so the file
has repeated deliveries, redeliveries after a timeout, redeliveries that arrive before the first
delivery, and one event id that is reused with another amount. The seed is fixed, so that every run
generates the same bytes.
"""

from __future__ import annotations

import json
import random
import string
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

SEED = 20260519
EVENTS = 200
REPEATED = 40
REDELIVERED = 52
OVERTAKEN = 20

FIRST_CREATED = 1_779_184_800  # 2026-05-19 10:00 UTC
SECONDS_BETWEEN_EVENTS = 7
#: The provider's delays before redeliveries.
BACKOFF_SECONDS = (60, 300, 900)

#: (event type, text on the customer's statement, usual prices in cents)
ORDERS = (
    ("charge.requested", "Order", (1290, 1999, 2450, 3995, 5400, 8999, 12900)),
    ("invoice.payment_due", "Invoice", (4900, 9900, 14900, 24900, 99000)),
    ("subscription.renewal_due", "Subscription", (499, 799, 1199, 1999)),
)
CURRENCIES = ("eur", "eur", "eur", "usd", "usd", "gbp")
CARD_BRANDS = ("visa", "mastercard", "amex")
FAILURES = ("timeout", "connection_reset", "http_502", "http_503")

Event = dict[str, Any]


class Arrival(NamedTuple):
    """One delivery to write; arrivals are sorted by time, then by number."""

    at: float
    number: int
    envelope: Event


class Provider:
    """Generates events and their deliveries."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._customers = [self._id("cus", 14) for _ in range(70)]
        self._accounts = [self._id("acct", 16) for _ in range(3)]
        self._arrivals: list[Arrival] = []

    def history(self) -> Iterator[Event]:
        """Returns all deliveries in order of arrival."""
        events = [self._event(number) for number in range(EVENTS)]
        for event in events:
            self._deliver(event)

        duplicated = self._random.sample(events, REPEATED + REDELIVERED + OVERTAKEN)
        for event in duplicated[:REPEATED]:
            self._repeat_delivery(event)
        for event in duplicated[REPEATED : REPEATED + REDELIVERED]:
            self._redeliver(event)
        for event in duplicated[REPEATED + REDELIVERED :]:
            self._overtake(event)
        self._reuse_id(events[11])

        return (arrival.envelope for arrival in sorted(self._arrivals))

    def _id(self, prefix: str, length: int) -> str:
        alphabet = string.ascii_letters + string.digits
        return f"{prefix}_" + "".join(self._random.choice(alphabet) for _ in range(length))

    def _event(self, number: int) -> Event:
        event_type, title, prices = self._random.choice(ORDERS)
        return {
            "id": self._id("evt", 20),
            "object": "event",
            "api_version": "2026-04-01",
            "type": event_type,
            "created": FIRST_CREATED + number * SECONDS_BETWEEN_EVENTS,
            "livemode": False,
            "account": self._random.choice(self._accounts),
            "data": {
                "object": {
                    "id": self._id("pay", 18),
                    "object": "payment",
                    "amount": self._random.choice(prices) * self._random.choice((1, 1, 1, 2, 3)),
                    "currency": self._random.choice(CURRENCIES),
                    "customer": self._random.choice(self._customers),
                    "payment_method": {
                        "id": self._id("pm", 16),
                        "brand": self._random.choice(CARD_BRANDS),
                        "last4": f"{self._random.randrange(10_000):04}",
                    },
                    "description": f"{title} {48_000 + number}",
                    "metadata": {"order_id": str(48_000 + number)},
                }
            },
        }

    def _deliver(self, event: Event, attempt: int = 1, after: float = 0.0) -> None:
        """Adds a delivery that is sent `after` seconds after the first one."""
        sent_at = event["created"] + 1 + after
        delivery = {
            "id": self._id("dlv", 12),
            "attempt": attempt,
            "sent_at": int(sent_at),
            "previous_failure": self._random.choice(FAILURES) if attempt > 1 else None,
        }
        self._arrive(sent_at, {**event, "delivery": delivery})

    def _arrive(self, at: float, envelope: Event) -> None:
        self._arrivals.append(Arrival(at, len(self._arrivals), envelope))

    def _arrivals_of(self, event: Event) -> list[Arrival]:
        return [arrival for arrival in self._arrivals if arrival.envelope["id"] == event["id"]]

    def _repeat_delivery(self, event: Event) -> None:
        """Repeats the first delivery 0.2 s later, as a retrying proxy does."""
        first = self._arrivals_of(event)[0]
        self._arrive(first.at + 0.2, first.envelope)

    def _redeliver(self, event: Event) -> None:
        """Adds one to three redeliveries, as after timeouts of the endpoint."""
        after = 0
        for attempt in range(2, 2 + self._random.choice((1, 1, 1, 2, 3))):
            after += BACKOFF_SECONDS[attempt - 2]
            self._deliver(event, attempt, after + self._random.random())

    def _overtake(self, event: Event) -> None:
        """Delays the first delivery until after the second one."""
        first = self._arrivals_of(event)[0]
        self._arrivals.remove(first)
        self._deliver(event, attempt=2, after=BACKOFF_SECONDS[0])
        self._arrive(first.at + BACKOFF_SECONDS[0] + 3 * SECONDS_BETWEEN_EVENTS, first.envelope)

    def _reuse_id(self, event: Event) -> None:
        """Adds a delivery with a known event id and another amount: an error or a forgery."""
        payment = event["data"]["object"]
        changed = {**payment, "amount": payment["amount"] + 100_000}
        self._deliver({**event, "data": {"object": changed}}, attempt=2, after=1_080)


def main() -> None:
    """Writes the events to standard output, one JSON object a line."""
    for envelope in Provider(SEED).history():
        sys.stdout.write(json.dumps(envelope, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
