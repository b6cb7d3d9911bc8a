"""The servers of a client, and their properties that the Redis user may read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable
from hashlib import sha1
from typing import Any, NamedTuple

from redis.exceptions import NoScriptError, ResponseError

_PROBE = "redis.call('SET', KEYS[1], '', 'PX', 1)"
_PROBE_SHA = sha1(_PROBE.encode(), usedforsecurity=False).hexdigest()


def server_info(client: Any) -> dict[str, Any]:
    """Returns the reply to INFO, and with it ``save`` of the configuration and ``clock_ahead``.

    Fields that the user may not read are missing. ``clock_ahead`` is the seconds by which the
    server's clock is ahead of this machine's.
    """
    sent_at = time.time()
    seconds, microseconds = client.time()
    info = {"clock_ahead": seconds + microseconds / 1e6 - (sent_at + time.time()) / 2}
    # A worker's user may lack INFO, and many hosted servers refuse CONFIG GET.
    for read in (client.info, lambda: client.config_get("save")):
        with contextlib.suppress(ResponseError):
            info |= read()
    return info


def write_error(client: Any, name: str) -> str:
    """Writes a one-millisecond key `name` in a script; returns the error if it is refused."""
    try:
        try:
            client.evalsha(_PROBE_SHA, 1, name)
        except NoScriptError:
            client.eval(_PROBE, 1, name)
    except ResponseError as error:
        return str(error)
    return ""


def server_of(client: Any) -> Hashable:
    """Returns the server and the database of a client, equal for every way to configure them."""
    pool = getattr(client, "connection_pool", None)
    if pool is None:
        return frozenset(node.name for node in client.get_nodes())
    options = pool.connection_kwargs
    database = int(options.get("db") or 0)
    manager = getattr(pool, "sentinel_manager", None)
    if manager:
        return pool.service_name, frozenset(map(server_of, manager.sentinels)), database
    if options.get("path"):
        return options["path"], database
    return address(options.get("host"), options.get("port")), database


class Primary(NamedTuple):
    """A server with records, and its name if it is a node of a cluster."""

    name: str
    client: Any


def primaries(client: Any) -> list[Primary]:
    """Returns the server of a blocking client, or the primaries of a cluster in a fixed order."""
    if not hasattr(client, "get_primaries"):
        return [Primary("", client)]
    nodes = sorted(client.get_primaries(), key=lambda node: str(node.name))
    return [Primary(node.name, client.get_redis_connection(node)) for node in nodes]


def address(host: str | None, port: int | None) -> tuple[str, int]:
    """Returns an address in one of its spellings; without a host and a port, the default one."""
    return {"localhost": "127.0.0.1"}.get(host := host or "localhost", host), int(port or 6379)
