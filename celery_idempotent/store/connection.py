"""From a URL, as Celery and kombu write it, to a Redis client."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlencode, urlsplit

from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from celery_idempotent.errors import IdempotencyError, SettingsError, StoreUnavailableError
from celery_idempotent.record.layout import corrupt

SCHEMES = ("redis", "rediss", "redis+socket", "unix")

#: Seconds that one command may take; it is sent three times at most.
COMMAND_TIMEOUT = 5.0
CONNECT_TIMEOUT = 2.0


def is_redis_url(url: object) -> bool:
    """Whether a result backend's or a broker's URL names a Redis that this library can use."""
    return isinstance(url, str) and url.split("://", 1)[0] in SCHEMES


def redacted(url: str) -> str:
    """`url` without user, password and query, fit for a log line."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def connect(url: str, *, timeout: float = COMMAND_TIMEOUT, resends: int = 2) -> Redis:
    """A client for `url`, which connects when first used.

    A command is sent again up to `resends` times when its reply does not come in `timeout` seconds
    or is lost: every script answers a resend as it answered the first time.

    Raises:
        SettingsError: if the URL is none that this library can use.
    """
    if not is_redis_url(url):
        found = re.match(r"([\w+.-]+)://", url)
        raise SettingsError(
            f"idempotency_redis_url has {f'the scheme {found[1]!r}' if found else 'no scheme'}; "
            f"it must be one of {', '.join(SCHEMES)}"
        ) from None
    try:
        client = Redis.from_url(
            _as_redis_py_writes_it(url),
            socket_timeout=timeout,
            socket_connect_timeout=min(timeout, CONNECT_TIMEOUT),
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), resends),
            retry_on_error=[RedisConnectionError, RedisTimeoutError],
        )
        # Options are only looked at when a connection is made; this one stays closed.
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, RedisError):
        # What they say may quote the URL, and that may hold a password.
        raise SettingsError(
            "idempotency_redis_url has a part that cannot be used: look at its port, its database "
            "and what stands behind the question mark"
        ) from None
    return client


def _as_redis_py_writes_it(url: str) -> str:
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    scheme = parts.scheme
    if scheme == "redis+socket":
        scheme = "unix"
        if "virtual_host" in query:
            query["db"] = query.pop("virtual_host").lstrip("/")
    if "ssl_cert_reqs" in query:
        query["ssl_cert_reqs"] = query["ssl_cert_reqs"].removeprefix("CERT_").lower()
    location = parts.netloc or ("" if scheme == "unix" else "localhost")
    return f"{scheme}://{location}{parts.path}" + (f"?{urlencode(query)}" if query else "")


def explained(error: Exception, key: str) -> IdempotencyError:
    """Whatever Redis, or the way to it, did wrong, as an error of ours."""
    if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
        return corrupt(key)
    if isinstance(error, ResponseError):
        return StoreUnavailableError(f"Redis refuses: {error}")
    return StoreUnavailableError(f"Redis cannot be reached: {error}")
