"""The servers that hold records, each with a circuit breaker and an outage log of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from celery_idempotent.core.store.breaker import Breaker
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.outage import OutageLogger


class Node:
    """A single server, a node of a cluster, or the cluster while the node of a record is unknown.

    One for each process, since another process may reach what this one does not.

    Args:
        name: host and port of a cluster's node; else empty.
        probe: sends it a PING.
    """

    def __init__(
        self, config: StoreConfig, name: str, probe: Callable[[str], Awaitable[None]]
    ) -> None:
        self.breaker = Breaker(lambda: probe(name), name)
        self.outage = OutageLogger(f"{config}, node {name}" if name else str(config))
