"""Takes webhooks from one queue, and puts each into another one once, a hundred at a time.

    python -m examples.forwarding.forward redis:// webhooks unique

A batch costs Redis one round trip to begin and one to complete, however many messages it has. They
are acknowledged when it is complete; a forwarder that dies in between leaves them to the next one,
which forwards them again once the lease has ended: between the two queues, as in every pipe that
ends in another system, a crash may double what was sent and not yet written down.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from kombu import Connection, Exchange, Queue
from kombu.message import Message

from celery_idempotent import Decision, Idempotency

BATCH = 100
#: Seconds that a batch waits to be full, and that a message waits which someone else is at.
PATIENCE = 0.5


class Forwarder:
    """From `source` to `target`, by way of a filter that forgets nothing for a day."""

    def __init__(self, connection: Connection, idem: Idempotency, source: str, target: str) -> None:
        self.connection = connection
        self.idem = idem
        self.source, self.target = (
            Queue(name, Exchange(""), routing_key=name) for name in (source, target)
        )
        self.forwarded = 0
        self._taken: list[tuple[Any, Message]] = []

    def run(self, until: Callable[[], bool]) -> None:
        """Forward until told otherwise."""
        take = self.connection.Consumer(
            [self.source], callbacks=[self._take], prefetch_count=BATCH, accept=["json"]
        )
        with take:
            while not until():
                self._fill()
                if self._taken:
                    self._forward()

    def _take(self, body: Any, message: Message) -> None:
        self._taken.append((body, message))

    def _fill(self) -> None:
        ends, full = time.monotonic() + PATIENCE, len(self._taken) + BATCH
        while len(self._taken) < full and (left := ends - time.monotonic()) > 0:
            try:
                self.connection.drain_events(timeout=left)
            except TimeoutError:
                return

    def _forward(self) -> None:
        taken, self._taken = self._taken, []
        held = []
        with self.idem.begin_many([body["id"] for body, _ in taken]) as batch:
            for entry, (body, message) in zip(batch, taken, strict=True):
                if entry.decision is Decision.RUN:
                    self._send(body)
                elif entry.decision is Decision.CONFLICT:
                    held.append((body, message))
            batch.check()  # so long that another may have begun? Then say nothing is done
            batch.complete_many()
        for body, message in taken:
            if (body, message) not in held:
                message.ack()
        # Another forwarder is at these, and may die: they come into the next batch.
        self._taken = held

    def _send(self, body: Any) -> None:
        self.connection.Producer().publish(
            body, routing_key=self.target.name, serializer="json", declare=[self.target]
        )
        self.forwarded += 1


if __name__ == "__main__":
    url, source, target = sys.argv[1:]
    with Connection(url) as connection:
        Forwarder(connection, Idempotency(url), source, target).run(until=lambda: False)
