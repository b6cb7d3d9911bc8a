"""All outages: the rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from labs.outages import faults
from labs.outages.faults import OutageSite
from labs.rig.site import DURABLE

#: Shorter than an outage.
SHORT_TIMEOUT = {"idempotency_redis_timeout": 1.0}
#: With appendfsync always, Redis exits if the disk is full.
EVERY_SECOND = {"appendonly": "yes", "appendfsync": "everysec"}
FORGOTTEN = "the promoted replica lacks acknowledged writes"


@dataclass(frozen=True, eq=False)
class Outage:
    """One outage."""

    name: str
    #: For the table.
    title: str
    fault: Callable[[OutageSite], AbstractContextManager[None]]
    #: Starts the servers; returns the app's settings for them.
    start: Callable[[OutageSite], Mapping[str, Any]] = faults.one_server
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Its duration, in seconds.
    seconds: float = 4.0
    #: Whether it begins before the worker starts.
    at_start: bool = False
    #: Whether it includes the broker, which may lose messages.
    affects_broker: bool = False
    #: Why keys may be executed twice, with different results; empty if they may not.
    may_execute_twice: str = ""
    #: Why callers may get an error; empty if they may not.
    may_raise: str = ""


def _rows() -> Iterator[Outage]:
    killed = partial(Outage, fault=faults.killed)
    yield killed("killed", "store killed, restarted")
    policy = {"idempotency_on_store_error": "run"}
    reason = "run executes without protection"
    yield killed("run", "… on_store_error = run", settings=policy, may_execute_twice=reason)
    policy = {"idempotency_on_store_error": "raise"}
    reason = "raise fails the task"
    yield killed("raise", "… on_store_error = raise", settings=policy, may_raise=reason)
    yield killed("rabbitmq", "… broker RabbitMQ", start=faults.with_rabbitmq)
    title = "… also broker and result backend"
    yield killed("everything", title, start=faults.one_for_all, affects_broker=True)
    yield killed("start", "store unreachable at worker start", at_start=True)
    yield Outage("frozen", "store frozen", faults.frozen, settings=SHORT_TIMEOUT)
    title = "store connections without replies"
    proxied = partial(Outage, start=faults.behind_proxy)
    yield proxied("black-hole", title, faults.black_hole, settings=SHORT_TIMEOUT)
    yield proxied("cut", "connections cut 20 times a second", faults.connections_cut)
    yield Outage("flushed", "scripts flushed 100 times a second", faults.scripts_flushed)
    yield Outage("full", "store out of memory (maxmemory)", faults.out_of_memory)
    start = partial(faults.one_server, config=EVERY_SECOND)
    yield Outage("disk", "disk of the store full (MISCONF)", faults.disk_full, start)
    yield Outage("read-only", "store read-only (READONLY)", faults.read_only)
    yield Outage("busy", "endless script of another client (BUSY)", faults.busy)
    title = "rights revoked (NOPERM)"
    yield Outage("rights", title, faults.rights_revoked, faults.with_rights)
    yield Outage("clients", "no more clients (maxclients)", faults.no_more_clients)
    yield Outage("descriptors", "descriptors of the worker used up", faults.no_descriptors)
    title = "store killed, and slow to load (LOADING)"
    yield Outage("loading", title, faults.loading, faults.slow_to_load)
    title = "store restored from a snapshot of four seconds ago"
    start, reason = partial(faults.one_server, config={"save": ""}), "the snapshot lacks records"
    yield Outage("snapshot", title, faults.restored, start, may_execute_twice=reason)
    other = partial(Outage, fault=faults.other_killed)
    start = partial(faults.other_server, setting="broker_url")
    yield other("broker", "broker (Redis) killed", start=start, affects_broker=True)
    # Else Celery acknowledges a message whose result it cannot store.
    settings = {"result_backend_always_retry": True}
    title = "result backend killed, result_backend_always_retry"
    start = partial(faults.other_server, setting="result_backend")
    yield other("results", title, start=start, settings=settings)
    failover = partial(Outage, fault=faults.failed_over, start=faults.with_sentinels, seconds=0.0)
    yield failover("sentinel", "Sentinel failover", may_execute_twice=FORGOTTEN)
    settings = {"idempotency_wait_replicas": 1}
    yield failover("sentinel-wait", "… wait_replicas = 1", settings=settings)
    yield Outage(
        *("cluster", "Cluster: master killed", faults.master_killed, faults.in_cluster),
        seconds=0.0,
        may_execute_twice=FORGOTTEN,
    )
    start, title = partial(faults.in_cluster, config=DURABLE), "… without a failover (CLUSTERDOWN)"
    yield Outage("cluster-down", title, faults.cluster_down, start)


OUTAGES = tuple(_rows())
