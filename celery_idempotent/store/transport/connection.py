"""From a place to a redis-py client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from redis import Redis, RedisCluster
from redis.backoff import ExponentialBackoff
from redis.cluster import ClusterNode
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import Sentinel

from celery_idempotent.errors import IdempotencyError, SettingsError, StoreUnavailableError
from celery_idempotent.record.layout import corrupt
from celery_idempotent.store import replicas
from celery_idempotent.store import url as urls
from celery_idempotent.store.config import StoreConfig

#: What a client raises when Redis, or the way to it, is in trouble.
CONNECTION_ERRORS = (RedisError, RedisClusterException, OSError)

#: As many as there are callers at a time, as up to redis-py 7; from 8 on it refuses the 101st.
_UNLIMITED = 2**31

#: Options of a place that are the sentinels', not the master's.
_OF_SENTINELS = ("master_name", "sentinel_kwargs", "min_other_sentinels")


class ClientClasses(NamedTuple):
    """redis-py's classes: those that block, or those of asyncio."""

    #: What the user is told to give.
    package: str
    redis: Any
    cluster: Any
    #: Of a cluster.
    node: Any
    sentinel: Any
    retry: Any


BLOCKING = ClientClasses("redis", Redis, RedisCluster, ClusterNode, Sentinel, Retry)


def connect(
    config: StoreConfig,
    *,
    timeout: float | None = None,
    retries: int = 1,
    classes: ClientClasses = BLOCKING,
) -> Any:
    """A client for `place`. It connects when it is first used; a cluster's does at once.

    Args:
        timeout: seconds that one command may take, `resends` included; the place's by default.
        resends: how often a command is sent again whose answer does not come. Every script answers
            a resend as it answered the first time.

    Raises:
        SettingsError: if the place is none that this library can use.
        RedisError, RedisClusterException, OSError: if a cluster does not answer.
    """
    if config.client is not None:
        return _users_own(config.client, classes)
    if not urls.is_redis_url(config.url):
        scheme = urls.scheme_of(config.url)
        raise SettingsError(
            f"idempotency_redis_url has {f'the scheme {scheme!r}' if scheme else 'no scheme'}; "
            f"it must be one of {', '.join(urls.SCHEMES)}"
        ) from None
    if urls.names_sentinels(config.url) and not config.options.get("master_name"):
        raise SettingsError(
            "idempotency_redis_url names sentinels: idempotency_redis_options must have the "
            "'master_name' that they watch"
        )
    timeout = (config.timeout if timeout is None else timeout) / (retries + 1)
    options = {
        "socket_timeout": timeout,
        "socket_connect_timeout": min(timeout, config.connect_timeout),
        "retry": classes.retry(ExponentialBackoff(cap=0.5, base=0.05), retries),
        "max_connections": _UNLIMITED,
        **{name: value for name, value in config.options.items() if name not in _OF_SENTINELS},
    }
    try:
        if urls.names_cluster(config.url):
            node = urls.redis_py_url(urls.parts_of(config.url)[0])
            others = [classes.node(*address) for address in urls.other_nodes(config.url)]
            return classes.cluster.from_url(node, startup_nodes=others, **options)
        options["retry_on_error"] = [RedisConnectionError, RedisTimeoutError]
        if urls.names_sentinels(config.url):
            return _master(config, options, classes)
        client = classes.redis.from_url(urls.redis_py_url(config.url), **options)
        # Options are only looked at when a connection is made; this one stays closed.
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError) as error:
        raise _invalid_part(error) from None
    except RedisError as error:
        if urls.names_cluster(config.url):
            raise
        raise _invalid_part(error) from None
    return client


def _master(config: StoreConfig, options: Mapping[str, Any], classes: ClientClasses) -> Any:
    """The master that the sentinels name, asked for anew with each connection."""
    known = urls.sentinels(config.url)
    timeout = {n: options[n] for n in ("socket_timeout", "socket_connect_timeout")}
    client = classes.sentinel(
        known.addresses,
        min_other_sentinels=config.options.get("min_other_sentinels", 0),
        sentinel_kwargs={**timeout, **(config.options.get("sentinel_kwargs") or {})},
        db=known.database,
        username=known.username,
        password=known.password,
        **options,
    ).master_for(config.options["master_name"])
    pool = client.connection_pool
    pool.connection_class(**pool.connection_kwargs)
    return client


def sentinels_of(client: Any) -> list[Any]:
    """The clients by which `client` asks who the master is: redis-py leaves them open."""
    pool = getattr(client, "connection_pool", None)  # a cluster's client has none
    manager = getattr(pool, "sentinel_manager", None)
    return [] if manager is None else list(manager.sentinels)


def close_client(client: Any) -> None:
    """Close all that `client` has open: redis-py leaves its sentinels, and a cluster's nodes."""
    client.close()
    for sentinel in sentinels_of(client):
        sentinel.close()
    if isinstance(client, RedisCluster):
        client.disconnect_connection_pools()  # type: ignore[no-untyped-call]


def _users_own(client: Any, classes: ClientClasses) -> Any:
    made = client() if callable(client) else client
    if not isinstance(made, (classes.redis, classes.cluster)):
        raise SettingsError(
            f"idempotency_redis_client gave a {type(made).__name__} that is neither a "
            f"{classes.package}.Redis nor a {classes.package}.RedisCluster"
        )
    if made.get_connection_kwargs().get("decode_responses"):
        raise SettingsError(
            "idempotency_redis_client has decode_responses=True, and records are bytes; give it "
            "a client without"
        )
    return made


def _invalid_part(error: Exception) -> SettingsError:
    # What it says may quote the URL, and that may hold a password.
    del error
    return SettingsError(
        "idempotency_redis_url has a part that cannot be used: look at its port, its database, "
        "what stands behind the question mark, and at idempotency_redis_options"
    )


def translate_error(error: Exception, key: str) -> IdempotencyError:
    """Whatever Redis, or the way to it, did wrong, as an error of ours."""
    if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
        return corrupt(key)
    if isinstance(error, ResponseError):
        return StoreUnavailableError(f"Redis refuses: {replicas.unable(error) or error}")
    return StoreUnavailableError(f"Redis cannot be reached: {error}")
