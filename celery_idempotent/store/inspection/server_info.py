"""Properties of a Redis server, as far as its user may read them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """Properties that durability depends on; None if the server does not show them."""

    #: "redis" or "valkey".
    flavour: str
    #: Empty if the server does not show it.
    version: tuple[int, ...]
    #: What it evicts when its memory is full.
    maxmemory_policy: str | None
    #: Bytes; 0 is no limit.
    maxmemory: int | None
    #: Whether every write is logged to disk.
    append_only: bool | None
    #: When snapshots are made, as in redis.conf; empty if never.
    snapshots: str | None
    #: Replicas that are connected.
    replicas: int | None
    #: Seconds that its clock is ahead of this machine's.
    clock_ahead: float

    @property
    def version_text(self) -> str:
        """Returns the name and version, such as ``Valkey 8.0.1``."""
        return f"{self.flavour.capitalize()} {'.'.join(map(str, self.version))}"


def server_info(client: Any) -> ServerInfo:
    """Reads the properties of the server that `client` is connected to."""
    sent_at = time.time()
    seconds, microseconds = client.time()
    local_time = (sent_at + time.time()) / 2
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
        clock_ahead=seconds + microseconds / 1e6 - local_time,
    )


def _info(client: Any) -> dict[str, Any]:
    """Returns the reply of INFO; empty if the user may not send it, as a worker's need not."""
    try:
        info: dict[str, Any] = client.info()
    except ResponseError:
        return {}
    return info


def _configured(client: Any, name: str) -> str | None:
    """Returns a directive; None if the server refuses CONFIG GET, as many hosted servers do."""
    try:
        value: str | None = client.config_get(name).get(name)
    except ResponseError:
        return None
    return value


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
