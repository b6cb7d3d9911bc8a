"""Creates redis-py clients from the config and translates their errors."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import isawaitable
from typing import Any

import redis
from redis import RedisCluster
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_idempotent.core.record.layout import corrupt
from celery_idempotent.core.store import url as urls
from celery_idempotent.core.store.config import SENTINEL_OPTIONS, StoreConfig
from celery_idempotent.errors import IdempotencyError, SettingsError, StoreUnavailableError

#: Raised by redis-py if Redis cannot be reached, or replies with an error.
CONNECTION_ERRORS = (RedisError, RedisClusterException, OSError)

#: Errors that mean that a server did not reply, or that a cluster has none for a slot.
NO_REPLY = (RedisConnectionError, RedisTimeoutError, RedisClusterException, OSError)

#: Seconds that connecting may take, unless the options set another limit.
CONNECT_TIMEOUT = 2.0

#: TCP keepalive as in redis-py 8, where it is the default. Without it, a load balancer silently
#: drops connections that are idle for some minutes, and the next command waits for its timeout.
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

#: For ``max_connections``: no limit, as in redis-py 7 and earlier; since 8 the default is 100.
_UNLIMITED = 2**31


def connect(
    config: StoreConfig,
    *,
    timeout: float | None = None,
    retries: int = 1,
    library: Any = redis,
) -> Any:
    """Creates a client. It connects on first use; a cluster's blocking client connects at once.

    Args:
        timeout: seconds that one command may take, `retries` included; the config's by default.
        retries: how many times a command without a reply is resent.
        library: redis or redis.asyncio.

    Raises:
        SettingsError: if the config is invalid.
        RedisError, RedisClusterException, OSError: if a cluster does not reply.
    """
    if config.client is not None:
        from celery_idempotent.core.store.transport.user_code import client_of

        return client_of(config.client, library)
    urls.check(config.url, config.options)
    scheme, is_cluster = urls.scheme_of(config.url), urls.names_cluster(config.url)
    if is_cluster and library is redis:
        retries = max(retries, 1)  # without one, it cannot connect while its first primary hangs
    timeout = (config.timeout if timeout is None else timeout) / (retries + 1)
    options = {
        "socket_timeout": timeout,
        "socket_connect_timeout": min(timeout, CONNECT_TIMEOUT),
        "retry": library.retry.Retry(ExponentialBackoff(cap=0.5, base=0.05), retries),
        "max_connections": _UNLIMITED,
        **({} if urls.names_socket(config.url) else _keepalive()),
        **{name: value for name, value in config.options.items() if name not in SENTINEL_OPTIONS},
    }
    connect_func, provider = map(options.get, ("redis_connect_func", "credential_provider"))
    if connect_func or provider:
        from celery_idempotent.core.store.transport.user_code import GuardedProvider, guarded

        if connect_func:
            wait = None if library is redis else result_of
            options["redis_connect_func"] = guarded(connect_func, wait)
        if provider:
            options["credential_provider"] = GuardedProvider(provider)
    try:
        if is_cluster:
            first, *others = urls.parts_of(config.url)
            nodes = [library.cluster.ClusterNode(*each) for each in urls.addresses(others, 6379)]
            url = urls.redis_py_url(first)
            return library.RedisCluster.from_url(url, startup_nodes=nodes, **options)
        options["retry_on_error"] = [RedisConnectionError, RedisTimeoutError]
        if scheme == urls.SENTINEL:
            client = _master(config, options, library)
        else:
            client = library.Redis.from_url(urls.redis_py_url(config.url), **options)
        # redis-py checks the options when a connection is created; this one is never opened.
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, RedisError) as error:
        if isinstance(error, RedisError) and is_cluster:
            raise
        # The text of redis-py's error is not shown, because it may contain a password.
        unknown = isinstance(error, TypeError) and re.search(r"argument '(\w+)'", str(error))
        raise SettingsError(
            urls.INVALID + (f"; redis-py does not accept {unknown[1]!r}" if unknown else "")
        ) from None
    return client


def _keepalive() -> dict[str, Any]:
    names = {name: value for name, value in KEEPALIVE.items() if hasattr(socket, name)}
    options = {getattr(socket, name): value for name, value in names.items()}
    return {"socket_keepalive": True, "socket_keepalive_options": options}


def _master(config: StoreConfig, options: Mapping[str, Any], library: Any) -> Any:
    """Creates a client of the master; each new connection gets its address from the Sentinels."""
    addresses, master = urls.sentinels(config.url)
    timeout = {n: options[n] for n in ("socket_timeout", "socket_connect_timeout")}
    sentinel = library.sentinel.Sentinel(
        addresses,
        min_other_sentinels=config.options.get("min_other_sentinels", 0),
        sentinel_kwargs={**timeout, **(config.options.get("sentinel_kwargs") or {})},
        **{**options, **{name: value for name, value in master.items() if value is not None}},
    )
    return sentinel.master_for(config.options["master_name"])


async def aclose_client(client: Any) -> None:
    """Closes `client` and what redis-py leaves open: Sentinels and cluster nodes."""
    pool = getattr(client, "connection_pool", None)  # a cluster's client has none
    manager = getattr(pool, "sentinel_manager", None)
    for each in (client, *(manager.sentinels if manager else ())):
        await result_of(getattr(each, "aclose", each.close)())  # redis-py 5.0.1 renamed it
    if isinstance(client, RedisCluster):
        client.disconnect_connection_pools()  # type: ignore[no-untyped-call]
    elif isinstance(client, redis.asyncio.RedisCluster):
        # After an error of a node, ``aclose`` of the cluster's client closes nothing.
        nodes: Any = client.nodes_manager
        close = nodes.aclose if hasattr(nodes, "aclose") else nodes.close
        for attribute in ("nodes_cache", "startup_nodes"):
            with suppress(*CONNECTION_ERRORS):
                await close(attribute)


class ClosedConnectionError(RedisConnectionError):
    """A connection of redis.asyncio was closed during a call."""


async def result_of(returned: Any, timeout: float | None = None) -> Any:
    """Returns the result of a method of redis-py; that of redis.asyncio is awaited first.

    Args:
        timeout: seconds that it may take on an event loop.
    """
    if not isawaitable(returned):
        return returned
    try:
        return await (returned if timeout is None else asyncio.wait_for(returned, timeout))
    except asyncio.TimeoutError as error:  # not an OSError before Python 3.11
        raise RedisTimeoutError("Redis did not reply in time") from error
    except (AttributeError, TypeError) as error:
        # redis-py up to 8.1 raises these without mentioning a connection (redis-py#4287).
        raise ClosedConnectionError(f"the connection was closed: {error}") from error


@contextmanager
def translated_errors(key: str = "") -> Iterator[None]:
    """Raises this library's error for an error of redis-py inside the block."""
    try:
        yield
    except CONNECTION_ERRORS as error:
        raise translate_error(error, key) from error


def translate_error(error: Exception, key: str) -> IdempotencyError:
    """Returns the error of this library for an error of redis-py."""
    if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
        return corrupt(key)
    if isinstance(error, ResponseError):
        return StoreUnavailableError(f"Redis replied with an error: {error}")
    return StoreUnavailableError(f"Redis cannot be reached: {error}")
