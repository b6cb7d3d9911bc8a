"""Write `events.jsonl`: what a payment provider's webhooks look like after a bad afternoon.

    python -m examples.payments.make_events > examples/payments/events.jsonl

Every line is one HTTP delivery in order of arrival. Providers deliver at least once, so the file
has what an endpoint sees: the same delivery twice, redeliveries after a timeout, copies that
overtake one another, and one event id that comes back with another amount. The seed is fixed:
the same bytes on every run.
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
TWINS = 40
REDELIVERED = 52
OVERTAKEN = 20

FIRST_CREATED = 1_779_184_800  # 2026-05-19 10:00 UTC
SECONDS_BETWEEN_EVENTS = 7
#: What a provider waits before it tries a delivery again.
BACKOFF_SECONDS = (60, 300, 900)

#: (event type, what the customer reads on the statement, usual prices in cents)
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
    """One delivery on its way into the file; arrivals are sorted by time, then by number."""

    at: float
    number: int
    envelope: Event


class Provider:
    """Makes events and delivers them, more often than once."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._customers = [self._id("cus", 14) for _ in range(70)]
        self._accounts = [self._id("acct", 16) for _ in range(3)]
        self._arrivals: list[Arrival] = []

    def history(self) -> Iterator[Event]:
        """Every delivery of the afternoon in order of arrival."""
        events = [self._event(number) for number in range(EVENTS)]
        for event in events:
            self._deliver(event)

        unlucky = self._random.sample(events, TWINS + REDELIVERED + OVERTAKEN)
        for event in unlucky[:TWINS]:
            self._deliver_twice(event)
        for event in unlucky[TWINS : TWINS + REDELIVERED]:
            self._redeliver(event)
        for event in unlucky[TWINS + REDELIVERED :]:
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
        """Attempt number `attempt` leaves `after` seconds behind the first and arrives at once."""
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

    def _deliver_twice(self, event: Event) -> None:
        """The very same delivery once more, at its heels: a proxy sent the request again."""
        first = self._arrivals_of(event)[0]
        self._arrive(first.at + 0.2, first.envelope)

    def _redeliver(self, event: Event) -> None:
        """The endpoint did not answer in time, once to three times over."""
        after = 0
        for attempt in range(2, 2 + self._random.choice((1, 1, 1, 2, 3))):
            after += BACKOFF_SECONDS[attempt - 2]
            self._deliver(event, attempt, after + self._random.random())

    def _overtake(self, event: Event) -> None:
        """The first delivery is stuck on the way, and the second arrives before it."""
        first = self._arrivals_of(event)[0]
        self._arrivals.remove(first)
        self._deliver(event, attempt=2, after=BACKOFF_SECONDS[0])
        self._arrive(first.at + BACKOFF_SECONDS[0] + 3 * SECONDS_BETWEEN_EVENTS, first.envelope)

    def _reuse_id(self, event: Event) -> None:
        """A known event id with another amount: a fault at the provider, or somebody's forgery."""
        payment = event["data"]["object"]
        changed = {**payment, "amount": payment["amount"] + 100_000}
        self._deliver({**event, "data": {"object": changed}}, attempt=2, after=1_080)


def main() -> None:
    """Write the events to standard output, one JSON object a line."""
    for envelope in Provider(SEED).history():
        sys.stdout.write(json.dumps(envelope, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
