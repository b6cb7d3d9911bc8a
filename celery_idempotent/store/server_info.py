"""What a Redis says of itself, as far as it may be asked."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What the promise depends on. None: the server did not say."""

    #: "redis" or "valkey".
    flavour: str
    #: Empty: it did not say.
    version: tuple[int, ...]
    #: What it drops when its memory is full.
    maxmemory_policy: str | None
    #: Bytes; 0: no limit.
    maxmemory: int | None
    #: Whether every write goes to a log.
    append_only: bool | None
    #: When snapshots are made, as in redis.conf; empty: never.
    snapshots: str | None
    #: Replicas that follow it now.
    replicas: int | None
    #: Seconds that its clock is ahead of this machine's.
    clock_ahead: float

    @property
    def version_text(self) -> str:
        """As people write it."""
        return f"{self.flavour.capitalize()} {'.'.join(map(str, self.version))}"


def server_info(client: Any) -> ServerInfo:
    """What the server behind `client` says."""
    asked_at = time.time()
    seconds, microseconds = client.time()
    here = (asked_at + time.time()) / 2
    info = _info(client)
    valkey = info.get("valkey_version")
    return ServerInfo(
        flavour="valkey" if valkey else "redis",
        version=_numbers(str(valkey or info.get("redis_version", ""))),
        maxmemory_policy=info.get("maxmemory_policy"),
        maxmemory=info.get("maxmemory"),
        append_only=None if "aof_enabled" not in info else bool(info["aof_enabled"]),
        snapshots=_configured(client, "save"),
        replicas=info.get("connected_slaves"),
        clock_ahead=seconds + microseconds / 1e6 - here,
    )


def _info(client: Any) -> dict[str, Any]:
    """What it says to those who may ask; workers need not."""
    try:
        told: dict[str, Any] = client.info()
    except ResponseError:
        return {}
    return told


def _configured(client: Any, name: str) -> str | None:
    """A directive of the server's; many hosted ones refuse to tell."""
    try:
        value: str | None = client.config_get(name).get(name)
    except ResponseError:
        return None
    return value


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
