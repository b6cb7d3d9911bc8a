"""Properties of a Redis server that the Redis user may read."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """Properties that affect durability; None if the server does not report them."""

    #: "redis" or "valkey".
    flavour: str
    #: Empty if the server does not report it.
    version: tuple[int, ...]
    #: What it evicts when memory is full.
    maxmemory_policy: str | None
    #: Bytes; 0 is no limit.
    maxmemory: int | None
    #: Bytes.
    used_memory: int | None
    #: Keys since it started.
    evicted: int | None
    #: The error when it refuses a write; empty if it accepts writes, or the user may not write.
    write_error: str
    #: Whether every write is logged to disk.
    append_only: bool | None
    #: When it takes snapshots, as in redis.conf; empty if never.
    snapshots: str | None
    #: Connected replicas.
    replicas: int | None
    #: Seconds by which its clock is ahead of this machine's.
    clock_ahead: float

    @property
    def version_text(self) -> str:
        """Returns the name and version, such as ``Valkey 8.0.1``."""
        return f"{self.flavour.capitalize()} {'.'.join(map(str, self.version))}"


def server_info(client: Any, write_error: str) -> ServerInfo:
    """Reads the properties of the server that `client` is connected to.

    Args:
        write_error: what :func:`write_error` returned.
    """
    sent_at = time.time()
    seconds, microseconds = client.time()
    local_time = (sent_at + time.time()) / 2
    # A worker's user may lack INFO, and many hosted servers refuse CONFIG GET.
    info: dict[str, Any] = {}
    snapshots: str | None = None
    with contextlib.suppress(ResponseError):
        info = client.info()
    with contextlib.suppress(ResponseError):
        snapshots = client.config_get("save").get("save")
    valkey = info.get("valkey_version")
    version = str(valkey or info.get("redis_version", ""))
    return ServerInfo(
        flavour="valkey" if valkey else "redis",
        version=tuple(int(part) for part in version.split(".") if part.isdigit()),
        maxmemory_policy=info.get("maxmemory_policy"),
        maxmemory=info.get("maxmemory"),
        used_memory=info.get("used_memory"),
        evicted=info.get("evicted_keys"),
        write_error=write_error,
        append_only=None if "aof_enabled" not in info else bool(info["aof_enabled"]),
        snapshots=snapshots,
        replicas=info.get("connected_slaves"),
        clock_ahead=seconds + microseconds / 1e6 - local_time,
    )


def write_error(client: Any, name: str) -> str:
    """Writes a one-millisecond key `name`; returns the error if the server refuses it."""
    try:
        client.set(name, b"", px=1)
    except NoPermissionError:
        pass  # a dashboard may use a read-only user
    except ResponseError as error:
        return str(error)
    return ""
