"""Checks the Redis server that holds the records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from celery_idempotent.core.printable import plural
from celery_idempotent.operations.doctor.finding import Check, Finding, Severity, applying

#: The oldest version of Redis with all commands that the scripts use.
OLDEST = (6, 2)
#: Seconds by which the clocks may differ.
MAX_CLOCK_OFFSET = 1.0
#: Fraction of maxmemory above which the server is almost full.
ALMOST_FULL = 0.9

#: The fix of a finding about something that the server does not report.
_UNKNOWN = "check it with your provider, or allow the command INFO"


def check(info: Mapping[str, Any], subject: str, required_replicas: int = 0) -> Iterator[Finding]:
    """Yields all findings about one server.

    Args:
        info: as `RecordReader.server_infos` returns it.
        subject: the server's name in findings.
        required_replicas: the option idempotency_wait_replicas.
    """
    version, policy = str(info.get("redis_version", "")), info.get("maxmemory_policy")
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    limit, evicted = info.get("maxmemory") or 0, info.get("evicted_keys") or 0
    used = info.get("used_memory", 0) / limit if limit else 0.0
    append_only, snapshots = info.get("aof_enabled"), info.get("save")
    persistence_unknown = not append_only and None in (append_only, snapshots)
    not_logged = not append_only and not persistence_unknown
    replicas, write_error = info.get("connected_slaves"), info["write_error"]
    too_few = replicas is not None and replicas < required_replicas
    ahead, is_valkey = info["clock_ahead"], "valkey_version" in info
    yield from applying(
        subject,
        Check(not (numbers or is_valkey), "server-version", Severity.NOTE,
            "the server does not report its version", _UNKNOWN, "it may be too old"),
        Check(not is_valkey and () < numbers < OLDEST, "server-version", Severity.ERROR,
            f"Redis {version} is too old",
            "upgrade the server to Redis 6.2 or later, or to Valkey",
            "it lacks commands that the scripts need"),
        Check(write_error, "writes-refused", Severity.ERROR,
            f"it refuses writes: {write_error}",
            "more maxmemory, the rights of the user (ACL), or what the error names",
            "no call can begin: idempotency_on_store_error applies to every message"),
        Check(used > ALMOST_FULL, "memory", Severity.WARNING,
            f"it uses {used:.0%} of maxmemory ({limit:,} bytes)",
            "more maxmemory, or a shorter idempotency_result_ttl",
            "a full server refuses writes, or evicts records"),
        Check(evicted, "evicted", Severity.WARNING,
            f"it has evicted {plural(evicted, 'key')} since it started",
            "maxmemory-policy noeviction (redis.conf), and more maxmemory",
            "if one was a record, a duplicate of its call runs again"),
        Check(policy is None, "eviction", Severity.NOTE,
            "the server does not report maxmemory-policy", _UNKNOWN, "it may evict records"),
        Check(policy not in (None, "noeviction"), "eviction", Severity.WARNING,
            f"maxmemory-policy is {policy}",
            "maxmemory-policy noeviction (redis.conf)",
            ("a full server" if limit else "once maxmemory is set, a full server")
            + " evicts records, and a duplicate of an evicted one runs again"),
        Check(persistence_unknown, "persistence", Severity.NOTE,
            "the server does not report whether it writes records to disk",
            "appendonly yes (redis.conf), or check it with your provider",
            "a restart may lose records"),
        Check(not_logged and not snapshots, "persistence", Severity.WARNING,
            "nothing is written to disk", "appendonly yes (redis.conf)",
            "a restart loses all records, and duplicates run again"),
        Check(not_logged and snapshots, "persistence", Severity.NOTE,
            f"only snapshots are written to disk (save {snapshots})", "appendonly yes (redis.conf)",
            "a crash loses the records since the last snapshot"),
        Check(abs(ahead) > MAX_CLOCK_OFFSET, "clocks", Severity.WARNING,
            f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this host's",
            "synchronize both clocks with NTP",
            "etas and countdowns depend on the hosts' clocks; leases use the server's clock alone"),
        Check(too_few, "replicas", Severity.ERROR,
            f"it has fewer replicas ({replicas}) than idempotency_wait_replicas "
            f"({required_replicas})",
            "a lower idempotency_wait_replicas, or more replicas",
            "each begin and each outcome times out waiting for them, as if Redis were unavailable"),
        Check(not required_replicas and replicas is None, "replicas", Severity.NOTE,
            "the server does not report its replicas", _UNKNOWN, "a failover may lose records"),
        Check(not required_replicas and replicas == 0, "replicas", Severity.NOTE,
            "it has no replica", "a replica, with Sentinel or Cluster",
            "while the server is down, idempotency_on_store_error applies to every message"),
        Check(not required_replicas and replicas, "replicas", Severity.NOTE,
            f"replication is asynchronous (replicas: {replicas})", "idempotency_wait_replicas = 1",
            "a failover loses what the new primary had not received yet"),
    )  # fmt: skip
