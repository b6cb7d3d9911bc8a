"""Reads Redis URLs in the formats of Celery and kombu, and writes them for redis-py.

No error shows a URL, because it may contain a password.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from celery_idempotent.errors import SettingsError

_ONE_SERVER = ("redis", "rediss", "valkey", "valkeys", "redis+socket", "unix")
SENTINEL = "sentinel"
_CLUSTER = ("redis+cluster", "rediss+cluster")
SCHEMES = (*_ONE_SERVER, SENTINEL, *_CLUSTER)

#: The text of the error for a URL that redis-py refuses.
INVALID = (
    "idempotency_redis_url is invalid: check its port, database and query parameters, and "
    "idempotency_redis_options, or those of the result backend or broker"
)


def scheme_of(url: str) -> str:
    """Returns the part before ``://``; empty if there is none."""
    scheme, separator, _ = url.partition("://")
    return scheme if separator else ""


def check(url: str, options: Mapping[str, Any]) -> None:
    """Rejects a URL that names no Redis server.

    Args:
        options: the options of the client.

    Raises:
        SettingsError: naming the scheme, never the URL, which may hold a password.
    """
    scheme = scheme_of(url)
    if scheme not in SCHEMES:
        raise SettingsError(
            f"idempotency_redis_url has {f'the scheme {scheme!r}' if scheme else 'no scheme'}; "
            f"it must be one of {', '.join(SCHEMES)}"
        ) from None
    if scheme == SENTINEL and not options.get("master_name"):
        raise SettingsError(
            "idempotency_redis_url lists Sentinels: idempotency_redis_options must have the "
            "'master_name' that they monitor"
        )


def names_one_server(url: str) -> bool:
    """Returns whether `url` names a single server, without Sentinels or a cluster."""
    return scheme_of(url) in _ONE_SERVER


def names_socket(url: str) -> bool:
    """Returns whether `url` names a server's Unix socket."""
    return scheme_of(url) in ("redis+socket", "unix")


def names_cluster(url: str) -> bool:
    """Returns whether `url` lists nodes of a Redis Cluster."""
    return scheme_of(url) in _CLUSTER


def parts_of(url: str) -> list[str]:
    """Returns the URLs of the Sentinels, or of the cluster's nodes, that a URL lists."""
    return [part for part in url.split(";") if part]


def addresses(urls: list[str], default_port: int) -> list[tuple[str, int]]:
    """Returns the host and port of each URL.

    Raises:
        ValueError: if a port is not a number.
    """
    split = map(urlsplit, urls)
    return [(parts.hostname or "localhost", parts.port or default_port) for parts in split]


def redacted(url: str) -> str:
    """Returns `url` without users, passwords and queries, for log lines."""
    several = scheme_of(url) in (SENTINEL, *_CLUSTER)
    split = map(urlsplit, parts_of(url) if several else [url])
    return ";".join(f"{p.scheme}://{p.netloc.rpartition('@')[2]}{p.path}" for p in split)


def redis_py_url(url: str) -> str:
    """Returns the URL of one server, or of one node of a cluster, for redis-py."""
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    query.pop("credential_provider", None)  # an option of the StoreConfig
    scheme = parts.scheme.removesuffix("+cluster").replace("valkey", "redis")
    if scheme == "redis+socket":
        scheme = "unix"
        if "virtual_host" in query:
            query["db"] = query.pop("virtual_host").lstrip("/")
    if "ssl_cert_reqs" in query:
        query["ssl_cert_reqs"] = query["ssl_cert_reqs"].removeprefix("CERT_").lower()
    location = parts.netloc or ("" if scheme == "unix" else "localhost")
    return f"{scheme}://{location}{parts.path}" + (f"?{urlencode(query)}" if query else "")


def sentinels(url: str) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Parses ``sentinel://host:port/db;sentinel://…``; the first has the database and credentials.

    Returns:
        The addresses of the Sentinels, and the options of the master that they monitor.

    Raises:
        ValueError: if a port or the database is not a number.
    """
    parts = parts_of(url)
    first = urlsplit(parts[0])
    return addresses(parts, 26379), {
        "db": int(first.path.strip("/") or 0),
        "username": unquote(first.username) if first.username else None,
        "password": unquote(first.password) if first.password else None,
    }


def socket_url(path: str, db: int) -> str:
    """Returns the URL of a database behind a Unix socket."""
    return f"redis+socket://{path}?virtual_host={db}"


def server_urls(scheme: str, addresses: Iterable[tuple[str, int]], db: int) -> str:
    """Returns the URL of a database of a server, or of the master of several Sentinels."""
    located = ((f"[{host}]" if ":" in host else host, port) for host, port in addresses)
    return ";".join(f"{scheme}://{host}:{port}/{db}" for host, port in located)
