"""URLs of Redis, as Celery and kombu write them and as redis-py does."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

_ONE_SERVER = ("redis", "rediss", "redis+socket", "unix")
_SENTINELS = "sentinel"
_CLUSTER = ("redis+cluster", "rediss+cluster")
SCHEMES = (*_ONE_SERVER, _SENTINELS, *_CLUSTER)

_SENTINEL_PORT = 26379
_REDIS_PORT = 6379


def scheme_of(url: str) -> str:
    """What stands before ``://``; empty if nothing does."""
    scheme, separator, _ = url.partition("://")
    return scheme if separator else ""


def is_redis_url(url: object) -> bool:
    """Whether a result backend's or a broker's URL names a Redis that this library can use."""
    return isinstance(url, str) and scheme_of(url) in SCHEMES


def names_sentinels(url: str) -> bool:
    """Whether `url` names the sentinels of a Redis."""
    return scheme_of(url) == _SENTINELS


def names_cluster(url: str) -> bool:
    """Whether `url` names nodes of a Redis Cluster."""
    return scheme_of(url) in _CLUSTER


def parts_of(url: str) -> list[str]:
    """The URLs of the sentinels, or of the cluster's nodes, that stand side by side in one."""
    return [part for part in url.split(";") if part]


def addresses(urls: list[str], default_port: int) -> list[tuple[str, int]]:
    """Host and port of each.

    Raises:
        ValueError: if a port is no number.
    """
    found = map(urlsplit, urls)
    return [(parts.hostname or "localhost", parts.port or default_port) for parts in found]


def redacted(url: str) -> str:
    """`url` without users, passwords and queries, fit for a log line."""
    several = names_sentinels(url) or names_cluster(url)
    return ";".join(map(_redacted, parts_of(url))) if several else _redacted(url)


def _redacted(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def redis_py_url(url: str) -> str:
    """The URL of one server, or of one node of a cluster."""
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    scheme = parts.scheme.removesuffix("+cluster")
    if scheme == "redis+socket":
        scheme = "unix"
        if "virtual_host" in query:
            query["db"] = query.pop("virtual_host").lstrip("/")
    if "ssl_cert_reqs" in query:
        query["ssl_cert_reqs"] = query["ssl_cert_reqs"].removeprefix("CERT_").lower()
    location = parts.netloc or ("" if scheme == "unix" else "localhost")
    return f"{scheme}://{location}{parts.path}" + (f"?{urlencode(query)}" if query else "")


def other_nodes(url: str) -> list[tuple[str, int]]:
    """The nodes that a cluster's `url` names beside the first, which may be down.

    Raises:
        ValueError: if a port is no number.
    """
    return addresses(parts_of(url)[1:], _REDIS_PORT)


@dataclass(frozen=True)
class Sentinels:
    """Who knows where the master is, and what that wants to hear."""

    addresses: tuple[tuple[str, int], ...]
    database: int
    username: str | None
    password: str | None


def sentinels(url: str) -> Sentinels:
    """``sentinel://host:port/db;sentinel://…``: database and credentials are the first one's.

    Raises:
        ValueError: if a port or the database is no number.
    """
    parts = parts_of(url)
    first = urlsplit(parts[0])
    return Sentinels(
        addresses=tuple(addresses(parts, _SENTINEL_PORT)),
        database=int(first.path.strip("/") or 0),
        username=unquote(first.username) if first.username else None,
        password=unquote(first.password) if first.password else None,
    )
