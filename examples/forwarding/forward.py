"""Forwards webhooks from one queue to another, each once, in batches of a hundred.

    python -m examples.forwarding.forward redis:// webhooks unique

A batch of any size takes one round trip to begin and one to complete. Its messages are acknowledged
after it has completed. If a forwarder dies before that, another one forwards the messages again
once the leases have expired: a crash can duplicate messages that were published but not completed.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from kombu import Connection, Exchange, Queue
from kombu.message import Message

from celery_idempotent import Decision, Idempotency, StoreUnavailableError

logger = logging.getLogger(__name__)

BATCH = 100
#: Seconds to wait for a full batch.
BATCH_TIMEOUT = 0.5


class Forwarder:
    """Forwards messages from `source` to `target`; duplicates within a day are dropped."""

    def __init__(self, connection: Connection, idem: Idempotency, source: str, target: str) -> None:
        self.connection = connection
        self.idem = idem
        self.source = Queue(source, Exchange(""), routing_key=source)
        self.target = Queue(target, Exchange(""), routing_key=target)
        self.forwarded = 0
        self._received: list[tuple[Any, Message]] = []

    def run(self, until: Callable[[], bool]) -> None:
        """Forwards messages until `until` returns true."""
        consumer = self.connection.Consumer(
            [self.source], callbacks=[self._receive], prefetch_count=BATCH, accept=["json"]
        )
        with consumer:
            while not until():
                self._fill_batch()
                if self._received:
                    self._forward_batch()

    def _receive(self, body: Any, message: Message) -> None:
        self._received.append((body, message))

    def _fill_batch(self) -> None:
        deadline = time.monotonic() + BATCH_TIMEOUT
        full = len(self._received) + BATCH
        while len(self._received) < full and (timeout := deadline - time.monotonic()) > 0:
            try:
                self.connection.drain_events(timeout=timeout)
            except TimeoutError:
                return

    def _forward_batch(self) -> None:
        received, self._received = self._received, []
        with self.idem.begin_many([webhook_id(body) for body, _ in received]) as batch:
            for entry, (body, _) in zip(batch, received, strict=True):
                if entry.decision is Decision.RUN:
                    self._send(body)
            batch.check()  # raises LeaseLostError if another forwarder may have taken over
            batch.complete_many()
            for entry, (body, message) in zip(batch, received, strict=True):
                unavailable = isinstance(entry.error, StoreUnavailableError)
                if entry.decision is Decision.CONFLICT or unavailable:
                    # Another forwarder holds the key and may die, or one node of a Redis Cluster
                    # does not reply: retry it in the next batch.
                    self._received.append((body, message))
                elif entry.decision is Decision.REJECTED:
                    logger.error("A webhook is rejected: %s", entry.error)
                    message.reject()  # the others are forwarded
                else:
                    message.ack()

    def _send(self, body: Any) -> None:
        self.connection.Producer().publish(
            body, routing_key=self.target.name, serializer="json", declare=[self.target]
        )
        self.forwarded += 1


def webhook_id(body: Any) -> Any:
    """Returns the key of a webhook; None, which is refused, if it has none."""
    return body.get("id") if isinstance(body, dict) else None


if __name__ == "__main__":
    url, source, target = sys.argv[1:]
    with Connection(url) as connection:
        Forwarder(connection, Idempotency(url), source, target).run(until=lambda: False)
