"""Creates redis-py clients from the config and translates their errors."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import isawaitable
from typing import Any, NamedTuple

import redis
from billiard.exceptions import SoftTimeLimitExceeded
from redis import CredentialProvider, RedisCluster
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_idempotent.core.printable import one_line
from celery_idempotent.core.record.layout import corrupt
from celery_idempotent.core.store import url as urls
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.errors import IdempotencyError, SettingsError, StoreUnavailableError

#: Raised by redis-py if Redis cannot be reached, or replies with an error.
CONNECTION_ERRORS = (RedisError, RedisClusterException, OSError)

#: Errors that mean that a server did not reply, or that a cluster has none for a slot.
NO_REPLY = (RedisConnectionError, RedisTimeoutError, RedisClusterException, OSError)

#: Seconds that connecting may take, unless ``idempotency_redis_options`` sets another limit.
CONNECT_TIMEOUT = 2.0

#: As in redis-py 8, which has them by default: a balancer drops connections that are idle for some
#: minutes, and a command on such a connection would wait for its timeout.
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

#: No limit, as in redis-py 7 and earlier; since 8 the default is 100.
_UNLIMITED = 2**31

#: Options for the Sentinels, not for the master.
_SENTINEL_OPTIONS = ("master_name", "sentinel_kwargs", "min_other_sentinels")


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
        return _user_client(config.client, library)
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
        **{name: value for name, value in config.options.items() if name not in _SENTINEL_OPTIONS},
    }
    if connect_func := options.get("redis_connect_func"):
        options["redis_connect_func"] = _guarded(connect_func, library)
    if provider := options.get("credential_provider"):
        options["credential_provider"] = _GuardedProvider(provider)
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
        # Without redis-py's message, which may contain a password.
        unknown = isinstance(error, TypeError) and re.search(r"argument '(\w+)'", str(error))
        raise SettingsError(
            "idempotency_redis_url is invalid: check its port, database and query parameters, and "
            "idempotency_redis_options, or those of the result backend or broker"
            + (f"; redis-py does not accept {unknown[1]!r}" if unknown else "")
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


async def aclose_client(client: Any) -> None:
    """Closes `client` and what redis-py leaves open: Sentinels and cluster nodes."""
    pool = getattr(client, "connection_pool", None)  # a cluster's client has none
    manager = getattr(pool, "sentinel_manager", None)
    for each in (client, *(manager.sentinels if manager else ())):
        await result_of(getattr(each, "aclose", each.close)())  # redis-py 5.0.1 renamed it
    if isinstance(client, RedisCluster):
        client.disconnect_connection_pools()  # type: ignore[no-untyped-call]
    elif isinstance(client, redis.asyncio.RedisCluster):
        # After an error of a node, its own method does nothing until the next command.
        nodes: Any = client.nodes_manager
        close = nodes.aclose if hasattr(nodes, "aclose") else nodes.close
        for attribute in ("nodes_cache", "startup_nodes"):
            with suppress(*CONNECTION_ERRORS):
                await close(attribute)


class ClosedConnectionError(RedisConnectionError):
    """A connection of redis.asyncio was closed during a call."""


async def result_of(returned: Any, timeout: float | None = None) -> Any:
    """Returns the result of a redis-py method, awaiting that of redis.asyncio.

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
def user_code(name: str) -> Iterator[None]:
    """Makes an error of the user's code an error of the connection."""
    try:
        yield
    except (RedisError, RedisClusterException, IdempotencyError, SoftTimeLimitExceeded):
        raise
    except Exception as error:
        raised = f"{type(error).__name__}: {one_line(str(error))}"
        raise RedisConnectionError(f"{name} raised {raised}") from error


def _guarded(connect_func: Callable[[Any], Any], library: Any) -> Callable[[Any], Any]:
    """Returns `connect_func`, whose errors are those of the connection."""

    def connect(connection: Any) -> None:
        with user_code("redis_connect_func"):
            connect_func(connection)

    async def connect_async(connection: Any) -> None:
        with user_code("redis_connect_func"):
            await result_of(connect_func(connection))

    return connect if library is redis else connect_async


class _GuardedProvider(CredentialProvider):
    """A credential provider, whose errors are those of the connection."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_provider"], name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Its class, since redis-py distinguishes providers that stream credentials."""
        return type(self._provider)

    def get_credentials(self) -> Any:
        with user_code("credential_provider"):
            return self._provider.get_credentials()

    async def get_credentials_async(self) -> Any:
        with user_code("credential_provider"):
            return await self._provider.get_credentials_async()


def _user_client(client: Any, library: Any) -> Any:
    with user_code("idempotency_redis_client"):
        created = client() if callable(client) else client
    if not isinstance(created, (library.Redis, library.RedisCluster)):
        found = f"{type(created).__module__}.{type(created).__qualname__}"
        raise SettingsError(
            f"idempotency_redis_client is a {found}; it must be a "
            f"{library.__name__}.Redis or a {library.__name__}.RedisCluster"
        )
    if created.get_connection_kwargs().get("decode_responses"):
        raise SettingsError(
            "idempotency_redis_client has decode_responses=True, but records are bytes; use a "
            "client without it"
        )
    return created


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
