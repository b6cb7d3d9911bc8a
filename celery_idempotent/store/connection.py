"""From a URL, as Celery and kombu write it, to a Redis client."""

from __future__ import annotations

from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from celery_idempotent.errors import IdempotencyError, SettingsError, StoreUnavailableError
from celery_idempotent.record.layout import corrupt

SCHEMES = ("redis", "rediss", "redis+socket", "unix")

#: Seconds that one command may take. An execution waits this long for its begin at most twice.
COMMAND_TIMEOUT = 5.0
CONNECT_TIMEOUT = 2.0


def is_redis_url(url: object) -> bool:
    """Whether a result backend's or a broker's URL names a Redis that this library can use."""
    return isinstance(url, str) and url.split("://", 1)[0] in SCHEMES


def redacted(url: str) -> str:
    """`url` without user, password and query, fit for a log line."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    return urlunsplit((parts.scheme, host + port, parts.path, "", ""))


def connect(url: str) -> Redis:
    """A client for `url`, which connects when first used.

    A command is sent again once or twice when its reply is lost: every script answers a resend as
    it answered the first time.

    Raises:
        SettingsError: if the URL is none that this library can use.
    """
    if not is_redis_url(url):
        raise SettingsError(
            f"idempotency_redis_url has the scheme {url.split('://', 1)[0]!r}; "
            f"it must be one of {', '.join(SCHEMES)}"
        )
    try:
        return Redis.from_url(
            _as_redis_py_writes_it(url),
            socket_timeout=COMMAND_TIMEOUT,
            socket_connect_timeout=CONNECT_TIMEOUT,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 2),
            retry_on_error=[RedisConnectionError, RedisTimeoutError],
        )
    except ValueError as error:
        raise SettingsError(f"idempotency_redis_url {redacted(url)}: {error}") from None


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
