"""What the Redis that holds the records makes of the promise."""

from __future__ import annotations

from collections.abc import Iterator

from celery_idempotent.doctor.finding import Finding, Severity
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.store.server_info import ServerFacts

AWAY = "store-away"

#: The oldest server whose commands and scripts suffice.
OLDEST = (6, 2)
#: Seconds that clocks may be apart.
CLOCKS_APART = 1.0


def away(place: str, error: IdempotencyError) -> Finding:
    """The finding for a server that cannot be asked."""
    return Finding(
        AWAY,
        Severity.ERROR,
        place,
        str(error),
        "idempotency_redis_url, or the server",
        "every message fares by idempotency_on_store_error",
    )


def check(facts: ServerFacts, place: str, waits_for: int = 0) -> Iterator[Finding]:
    """All findings about one server.

    Args:
        waits_for: how many replicas must have a begin or an outcome before it counts.
    """
    for one in (_version, _eviction, _persistence, _clock):
        yield from one(facts, place)
    yield from _replicas(facts, place, waits_for)


def _version(facts: ServerFacts, place: str) -> Iterator[Finding]:
    if not facts.version:
        yield _unknown("server-version", place, "version", "whether it is too old")
    elif facts.flavour == "redis" and facts.version < OLDEST:
        yield Finding(
            "server-version",
            Severity.ERROR,
            place,
            f"{facts.version_text} is too old",
            "the server: Redis 6.2 or later, or Valkey",
            "the scripts need commands that it does not have",
        )


def _eviction(facts: ServerFacts, place: str) -> Iterator[Finding]:
    policy = facts.maxmemory_policy
    if policy is None:
        yield _unknown("eviction", place, "maxmemory-policy", "whether records may be evicted")
    elif policy != "noeviction":
        full = "" if facts.maxmemory else ", once maxmemory is set"
        yield Finding(
            "eviction",
            Severity.WARNING,
            place,
            f"maxmemory-policy is {policy}",
            "maxmemory-policy noeviction (redis.conf)",
            f"a full server drops records{full}, and a duplicate of a dropped one runs again",
        )


def _persistence(facts: ServerFacts, place: str) -> Iterator[Finding]:
    if facts.append_only:
        return
    if facts.append_only is None or facts.snapshots is None:
        yield _unknown("persistence", place, "appendonly and save", "what a restart forgets")
    elif not facts.snapshots:
        yield Finding(
            "persistence",
            Severity.WARNING,
            place,
            "nothing is written to disk",
            "appendonly yes (redis.conf)",
            "a restart forgets every record, and whatever is delivered again runs again",
        )
    else:
        yield Finding(
            "persistence",
            Severity.NOTE,
            place,
            f"only snapshots are written to disk (save {facts.snapshots})",
            "appendonly yes (redis.conf)",
            "a crash forgets the records since the last one",
        )


def _replicas(facts: ServerFacts, place: str, waits_for: int) -> Iterator[Finding]:
    if facts.replicas is not None and facts.replicas < waits_for:
        yield Finding(
            "replicas",
            Severity.ERROR,
            place,
            f"{facts.replicas} replicas follow, and idempotency_wait_replicas is {waits_for}",
            "idempotency_wait_replicas, or more replicas",
            "no begin and no outcome counts until so many have it",
        )
    elif waits_for:
        return
    elif facts.replicas is None:
        yield _unknown("replicas", place, "replication", "whether a failover finds the records")
    elif facts.replicas == 0:
        yield Finding(
            "replicas",
            Severity.NOTE,
            place,
            "no replica follows",
            "a replica, with Sentinel or Cluster",
            "while the server is down, messages fare by idempotency_on_store_error",
        )
    else:
        yield Finding(
            "replicas",
            Severity.NOTE,
            place,
            f"{facts.replicas} follow, asynchronously",
            "idempotency_wait_replicas = 1",
            "a failover forgets what the new primary had not yet received",
        )


def _clock(facts: ServerFacts, place: str) -> Iterator[Finding]:
    apart = facts.clock_ahead
    if abs(apart) > CLOCKS_APART:
        yield Finding(
            "clocks",
            Severity.WARNING,
            place,
            f"its clock is {abs(apart):.1f} s {'ahead' if apart > 0 else 'behind'}, seen from here",
            "NTP, on both",
            "leases go by the server's clock alone, but etas and countdowns do not",
        )


def _unknown(name: str, place: str, what: str, whether: str) -> Finding:
    return Finding(
        name,
        Severity.NOTE,
        place,
        f"the server does not tell its {what}",
        "look it up at your provider, or allow INFO and CONFIG|GET",
        f"it cannot be told {whether}",
    )
