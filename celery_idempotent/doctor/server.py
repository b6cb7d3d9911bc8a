"""Checks the Redis server that holds the records."""

from __future__ import annotations

from collections.abc import Iterator

from celery_idempotent.doctor.finding import Finding, Severity
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.store.inspection.server_info import ServerInfo

#: Name of the finding for a server that does not reply.
UNREACHABLE = "store-unreachable"

#: The oldest version of Redis that has all commands that the scripts use.
OLDEST = (6, 2)
#: Seconds by which the clocks may differ.
MAX_CLOCK_OFFSET = 1.0


def unreachable(subject: str, error: IdempotencyError) -> Finding:
    """Returns the finding for a server that cannot be reached or refuses the connection."""
    return Finding(
        UNREACHABLE, Severity.ERROR, subject,
        str(error),
        "idempotency_redis_url, or start the server",
        "idempotency_on_store_error applies to every message",
    )  # fmt: skip


def check(info: ServerInfo, subject: str, required_replicas: int = 0) -> Iterator[Finding]:
    """Yields all findings about one server.

    Args:
        subject: the server, as findings name it.
        required_replicas: the option idempotency_wait_replicas.
    """
    yield from _check_version(info, subject)
    yield from _check_eviction(info, subject)
    yield from _check_persistence(info, subject)
    yield from _check_clock(info, subject)
    yield from _check_replicas(info, subject, required_replicas)


def _check_version(info: ServerInfo, subject: str) -> Iterator[Finding]:
    if not info.version:
        yield _not_reported("server-version", subject, "its version", "it may be too old")
    elif info.flavour == "redis" and info.version < OLDEST:
        yield Finding(
            "server-version", Severity.ERROR, subject,
            f"{info.version_text} is too old",
            "upgrade the server to Redis 6.2 or later, or to Valkey",
            "it lacks commands that the scripts need",
        )  # fmt: skip


def _check_eviction(info: ServerInfo, subject: str) -> Iterator[Finding]:
    policy = info.maxmemory_policy
    if policy is None:
        yield _not_reported("eviction", subject, "maxmemory-policy", "it may evict records")
    elif policy != "noeviction":
        yield Finding(
            "eviction", Severity.WARNING, subject,
            f"maxmemory-policy is {policy}",
            "maxmemory-policy noeviction (redis.conf)",
            ("a full server" if info.maxmemory else "once maxmemory is set, a full server")
            + " evicts records, and a duplicate of an evicted one runs again",
        )  # fmt: skip


def _check_persistence(info: ServerInfo, subject: str) -> Iterator[Finding]:
    if info.append_only:
        return
    if info.append_only is None or info.snapshots is None:
        yield _not_reported(
            "persistence", subject, "appendonly and save", "a restart may lose records"
        )
    elif not info.snapshots:
        yield Finding(
            "persistence", Severity.WARNING, subject,
            "nothing is written to disk",
            "appendonly yes (redis.conf)",
            "a restart loses all records, and duplicates run again",
        )  # fmt: skip
    else:
        yield Finding(
            "persistence", Severity.NOTE, subject,
            f"only snapshots are written to disk (save {info.snapshots})",
            "appendonly yes (redis.conf)",
            "a crash loses the records since the last snapshot",
        )  # fmt: skip


def _check_replicas(info: ServerInfo, subject: str, required: int) -> Iterator[Finding]:
    if info.replicas is not None and info.replicas < required:
        yield Finding(
            "replicas", Severity.ERROR, subject,
            f"it has fewer replicas ({info.replicas}) than idempotency_wait_replicas ({required})",
            "a lower idempotency_wait_replicas, or more replicas",
            "each begin and each outcome times out waiting for them, as if Redis were unavailable",
        )  # fmt: skip
    elif required:
        return
    elif info.replicas is None:
        yield _not_reported("replicas", subject, "its replicas", "a failover may lose records")
    elif info.replicas == 0:
        yield Finding(
            "replicas", Severity.NOTE, subject,
            "it has no replica",
            "a replica, with Sentinel or Cluster",
            "while the server is down, idempotency_on_store_error applies to every message",
        )  # fmt: skip
    else:
        yield Finding(
            "replicas", Severity.NOTE, subject,
            f"replication is asynchronous (replicas: {info.replicas})",
            "idempotency_wait_replicas = 1",
            "a failover loses what the new primary had not received yet",
        )  # fmt: skip


def _check_clock(info: ServerInfo, subject: str) -> Iterator[Finding]:
    offset = info.clock_ahead
    if abs(offset) > MAX_CLOCK_OFFSET:
        direction = "ahead of" if offset > 0 else "behind"
        yield Finding(
            "clocks", Severity.WARNING, subject,
            f"its clock is {abs(offset):.1f} s {direction} this host's",
            "synchronise both clocks by NTP",
            "etas and countdowns depend on the hosts' clocks; leases use the server's clock alone",
        )  # fmt: skip


def _not_reported(name: str, subject: str, what: str, consequence: str) -> Finding:
    return Finding(
        name, Severity.NOTE, subject,
        f"the server does not report {what}",
        "check it with your provider, or allow the commands INFO and CONFIG|GET",
        consequence,
    )  # fmt: skip
