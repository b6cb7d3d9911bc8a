"""The settings of a connection to Redis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_idempotent.core.key import Key
from celery_idempotent.core.store.url import redacted

#: Options for the connections to the Sentinels; all others are for those to the master.
SENTINEL_OPTIONS = ("master_name", "sentinel_kwargs", "min_other_sentinels")
#: Maximum seconds that a command waits for replicas.
LONGEST_WAIT = 1.0


@dataclass(frozen=True, kw_only=True, repr=False)
class StoreConfig:
    """One Redis deployment and one prefix in it. Times are in seconds."""

    #: In the format of Celery and kombu; empty if `client` is given.
    url: str = ""
    #: The first part of every name in Redis.
    prefix: str = "idem"
    #: Like Celery's transport options: master_name, sentinel_kwargs, ssl_… and all other
    #: arguments of redis-py's connections.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: The user's redis-py client, or a callable that returns one.
    client: Any = None
    #: Limit of one command, resends included.
    timeout: float = 5.0
    #: Replicas that must acknowledge a begin, a step or an outcome.
    wait_replicas: int = 0

    def name(self, key: Key) -> str:
        """Returns the name of a record; in a cluster, messages share the slot of their key."""
        name = f"{self.prefix}:{key}"
        return f"{self.prefix}:{{{name}}}:{key.message}" if key.message else name

    def turn_name(self, key: Key) -> str:
        """Returns the name of the turn of a key that may run again: that of the key itself."""
        return f"{self.prefix}:{key}"

    def slot_name(self, key: Key) -> str:
        """Returns the name of the slot of a key."""
        return f"{self.prefix}:{{{self.prefix}:{key}}}:"

    @property
    def wait_timeout(self) -> float:
        """Seconds to wait for replicas; shorter than the timeout of the command."""
        return min(LONGEST_WAIT, self.timeout / 4)

    @property
    def borrows_client(self) -> bool:
        """Whether `client` belongs to the user, who closes it."""
        return self.client is not None and not callable(self.client)

    def __str__(self) -> str:
        """Returns the URL without secrets, for log lines."""
        return redacted(self.url) if self.url else f"{type(self.client).__name__} given by the user"


def chosen(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns the options of these names that are set."""
    return {name: options[name] for name in names if options.get(name) is not None}
