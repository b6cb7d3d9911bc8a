"""Where the records are, and how that Redis is spoken to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_idempotent.store.url import redacted


@dataclass(frozen=True, kw_only=True, repr=False)
class StoreConfig:
    """One Redis of any kind, and one prefix in it. Times are in seconds."""

    #: As Celery and kombu write it; empty where `client` is given.
    url: str = ""
    #: Of every name in Redis.
    prefix: str = "idem"
    #: What Celery's transport options have: master_name, sentinel_kwargs, ssl_…, and whatever else
    #: redis-py's connections take.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: The user's own redis-py client, or what makes one.
    client: Any = None
    #: What one command may take, resends included.
    timeout: float = 5.0
    #: What connecting may take.
    connect_timeout: float = 2.0
    #: Replicas that must have a begin or an outcome before it counts.
    wait_replicas: int = 0
    #: Whether it must have reached the disks, too.
    wait_aof: bool = False
    #: How long that may take.
    wait_timeout: float = 1.0
    #: Commands that may fail in a row before Redis is left alone for a while.
    breaker_threshold: int = 2
    #: The longest while.
    breaker_max_delay: float = 30.0

    @property
    def borrows_client(self) -> bool:
        """Whether its client is used elsewhere, too, and so is never closed here."""
        return self.client is not None and not callable(self.client)

    def __str__(self) -> str:
        """Without secrets, fit for a log line."""
        return redacted(self.url) if self.url else f"{type(self.client).__name__} of your own"
