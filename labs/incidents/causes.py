"""The incidents: what each does to a real shop, and by which words a place reports it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.servers.redis_server import RedisServer
from tests.waiting import eventually
from tests.worker.harness import Shop
from tests.worker.tasks import charge, crash_looping, misruled, pack, short_lease

#: Calls of an incident that is about calls; messages in an outage; seconds for which Redis is away.
CALLS, MESSAGES, AWAY = 100, 20, 35.0


class Scene(NamedTuple):
    """A shop with a worker, and its servers."""

    shop: Shop
    broker: RedisServer
    records: RedisServer

    def run_held(self, order: str) -> int:
        """Begins an execution that waits; returns its process."""
        self.shop.ledger.hold(order)
        short_lease.delay(order)
        return self.shop.ledger.wait_for_run(order).pid


class Incident(NamedTuple):
    """One incident. A place reports it as soon as a text that is new there matches."""

    title: str
    #: Prepares it, and returns what causes it.
    prepare: Callable[[Scene], Callable[[], Any]]
    #: Regular expressions.
    log: str
    alert: str
    health: str
    dashboard: str


def fill(scene: Scene) -> Callable[[], Any]:
    return lambda: (scene.records.client().config_set("maxmemory", "1"), publish(pack))


def freeze(scene: Scene) -> Callable[[], Any]:
    pid = scene.run_held("frozen")
    return lambda: os.kill(pid, signal.SIGSTOP)


def evict(scene: Scene) -> Callable[[], Any]:
    scene.run_held("evicted")
    client = scene.records.client()
    name = f"idem:{short_lease.idempotency_key_of('evicted')}"

    def is_evicted() -> bool:
        # Another user of the server writes, until the record of the execution is gone.
        for _ in range(200):
            client.set(f"page:{time.monotonic_ns()}", b"x" * 1_000)
        return not client.exists(name)

    def cause() -> None:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", str(client.info("memory")["used_memory"] + 300_000))
        eventually(is_evicted, "the record is evicted")

    return cause


def stop_redis(scene: Scene) -> Callable[[], Any]:
    return lambda: (scene.records.kill(), publish(pack))


def reuse_keys(scene: Scene) -> Callable[[], Any]:
    charge.delay("reused", 0).get(timeout=30)
    return lambda: [charge.delay("reused", number + 1) for number in range(CALLS)]


def publish(task: Any, *args: str, number: int = MESSAGES) -> None:
    for each in range(number):
        task.delay(*args, f"incident-{each}")


AWAY_TEXT = "cannot be reached|does not reply|[Cc]onnection refused"
INCIDENTS = {
    "full": Incident(
        "Redis is full and refuses writes", fill,
        "maxmemory", "StoreUnavailable", "writes-refused", "refuses writes"),
    "frozen": Incident(
        "an execution is frozen past its lease (2 s)", freeze,
        "does not renew its lease", "LeaseExpired", "lease-expired", "lease expired"),
    "broker": Incident(
        "the broker is down", lambda scene: scene.broker.kill,
        AWAY_TEXT, "BrokerUnavailable", "broker-unreachable", AWAY_TEXT),
    "evicted": Incident(
        "Redis evicts records, including that of an execution", evict,
        "has evicted", "LeaseLost", "evicted: ", "has evicted"),
    "away": Incident(
        f"Redis is away for {AWAY:g} s", stop_redis,
        AWAY_TEXT, "StoreUnavailable", "store-unreachable", AWAY_TEXT),
    "reused": Incident(
        f"{CALLS} calls reuse a key with other arguments", reuse_keys,
        "KeyReusedError", "KeyReused", "key-reused", "other arguments"),
    "rule": Incident(
        f"the key rule raises for {CALLS} calls",
        lambda _: lambda: publish(misruled, "raises", number=CALLS),
        "KeyRuleError", "KeyRule", "rule-raised", "no key could be derived"),
    "poisoned": Incident(
        "a call kills its process at each of 7 attempts",
        lambda _: lambda: crash_looping.delay("poisoned"),
        "PoisonedTaskError", "Poisoned", "^poisoned: ", "have died"),
}  # fmt: skip
