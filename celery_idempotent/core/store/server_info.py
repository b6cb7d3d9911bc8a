"""Which servers a client or a store uses, and what they reveal about themselves.

Used by the doctor, statistics and listings; an ACL may hide a part of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterable
from hashlib import sha1
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.exceptions import NoScriptError, ResponseError

from celery_idempotent.core.printable import plural
from celery_idempotent.core.store.transport.connection import CONNECTION_ERRORS
from celery_idempotent.errors import IdempotencyError

if TYPE_CHECKING:
    from celery_idempotent.core.store.record_store import RecordStore

#: A script that shows whether scripts may write.
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


def location(store: RecordStore) -> Hashable:
    """Returns server, database and prefix: equal for two stores if they hold the same records."""
    try:
        server = server_of(store.client)
    except (IdempotencyError, *CONNECTION_ERRORS):  # a cluster in an outage
        server = store.config.url or id(store.config.client)
    return server, store.config.prefix


def distinct(stores: Iterable[RecordStore]) -> list[RecordStore]:
    """Returns `stores` without those that hold the records of an earlier one."""
    stores = list(dict.fromkeys(stores))
    if len(stores) < 2:
        return stores  # without reading their location, since a cluster's would connect
    by_location: dict[Hashable, RecordStore] = {}
    for store in stores:
        by_location.setdefault(location(store), store)
    return list(by_location.values())


def evictions(store: RecordStore) -> str:
    """Returns `` (it has evicted 5 keys)``; empty if there are none, or if unknown.

    Always empty on an event loop, because the client blocks.
    """
    number = 0
    with contextlib.suppress(*CONNECTION_ERRORS):
        for node in () if store.is_async else primaries(store.client):
            with contextlib.suppress(*CONNECTION_ERRORS):
                number += node.client.info("stats").get("evicted_keys", 0)
    return f" (it has evicted {plural(number, 'key')})" if number else ""


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
