"""What the Redis that holds the records makes of the promise."""

from __future__ import annotations

from collections.abc import Iterator

from celery_idempotent.doctor.finding import Finding, Severity
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.store.server_info import ServerInfo

AWAY = "store-away"

#: The oldest server whose commands and scripts suffice.
OLDEST = (6, 2)
#: Seconds that clocks may be apart.
CLOCKS_APART = 1.0


def away(config: str, error: IdempotencyError) -> Finding:
    """The finding for a server that cannot be asked."""
    return Finding(
        AWAY,
        Severity.ERROR,
        config,
        str(error),
        "idempotency_redis_url, or the server",
        "every message fares by idempotency_on_store_error",
    )


def check(server_info: ServerInfo, config: str, waits_for: int = 0) -> Iterator[Finding]:
    """All findings about one server.

    Args:
        waits_for: how many replicas must have a begin or an outcome before it counts.
    """
    for one in (_version, _eviction, _persistence, _clock):
        yield from one(server_info, config)
    yield from _replicas(server_info, config, waits_for)


def _version(server_info: ServerInfo, config: str) -> Iterator[Finding]:
    if not server_info.version:
        yield _unknown("server-version", config, "version", "whether it is too old")
    elif server_info.flavour == "redis" and server_info.version < OLDEST:
        yield Finding(
            "server-version",
            Severity.ERROR,
            config,
            f"{server_info.version_text} is too old",
            "the server: Redis 6.2 or later, or Valkey",
            "the scripts need commands that it does not have",
        )


def _eviction(server_info: ServerInfo, config: str) -> Iterator[Finding]:
    policy = server_info.maxmemory_policy
    if policy is None:
        yield _unknown("eviction", config, "maxmemory-policy", "whether records may be evicted")
    elif policy != "noeviction":
        full = "" if server_info.maxmemory else ", once maxmemory is set"
        yield Finding(
            "eviction",
            Severity.WARNING,
            config,
            f"maxmemory-policy is {policy}",
            "maxmemory-policy noeviction (redis.conf)",
            f"a full server drops records{full}, and a duplicate of a dropped one runs again",
        )


def _persistence(server_info: ServerInfo, config: str) -> Iterator[Finding]:
    if server_info.append_only:
        return
    if server_info.append_only is None or server_info.snapshots is None:
        yield _unknown("persistence", config, "appendonly and save", "what a restart forgets")
    elif not server_info.snapshots:
        yield Finding(
            "persistence",
            Severity.WARNING,
            config,
            "nothing is written to disk",
            "appendonly yes (redis.conf)",
            "a restart forgets every record, and whatever is delivered again runs again",
        )
    else:
        yield Finding(
            "persistence",
            Severity.NOTE,
            config,
            f"only snapshots are written to disk (save {server_info.snapshots})",
            "appendonly yes (redis.conf)",
            "a crash forgets the records since the last one",
        )


def _replicas(server_info: ServerInfo, config: str, waits_for: int) -> Iterator[Finding]:
    if server_info.replicas is not None and server_info.replicas < waits_for:
        yield Finding(
            "replicas",
            Severity.ERROR,
            config,
            f"{server_info.replicas} replicas follow, and idempotency_wait_replicas is {waits_for}",
            "idempotency_wait_replicas, or more replicas",
            "no begin and no outcome counts until so many have it",
        )
    elif waits_for:
        return
    elif server_info.replicas is None:
        yield _unknown("replicas", config, "replication", "whether a failover finds the records")
    elif server_info.replicas == 0:
        yield Finding(
            "replicas",
            Severity.NOTE,
            config,
            "no replica follows",
            "a replica, with Sentinel or Cluster",
            "while the server is down, messages fare by idempotency_on_store_error",
        )
    else:
        yield Finding(
            "replicas",
            Severity.NOTE,
            config,
            f"{server_info.replicas} follow, asynchronously",
            "idempotency_wait_replicas = 1",
            "a failover forgets what the new primary had not yet received",
        )


def _clock(server_info: ServerInfo, config: str) -> Iterator[Finding]:
    offset = server_info.clock_ahead
    if abs(offset) > CLOCKS_APART:
        yield Finding(
            "clocks",
            Severity.WARNING,
            config,
            f"its clock is {abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}, "
            "seen from here",
            "NTP, on both",
            "leases go by the server's clock alone, but etas and countdowns do not",
        )


def _unknown(name: str, config: str, what: str, whether: str) -> Finding:
    return Finding(
        name,
        Severity.NOTE,
        config,
        f"the server does not tell its {what}",
        "look it up at your provider, or allow INFO and CONFIG|GET",
        f"it cannot be told {whether}",
    )
