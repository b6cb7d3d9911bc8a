"""Incidents of a real worker raise their alerts in a real Prometheus, and no others.

Each incident happens to a task of its own. Prometheus scrapes the worker and evaluates the rules of
docs/alerts.yml each second; only the times for which something must last are shortened.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis

from celery_idempotent.core.store import commands
from tests.faults.proxy import Proxy
from tests.flow.deliveries import begin_elsewhere
from tests.servers.prometheus import Prometheus
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.harness import LOST_BROKER, Shop
from tests.worker.tasks import (
    charge,
    crash_looping,
    final,
    flaky,
    heartless,
    misruled,
    orphaned,
    pack,
    raising,
    short_lease,
    slow,
    strict,
    unguarded,
    unreadable,
    unsaved,
    unserialisable,
)

pytestmark = [pytest.mark.worker, pytest.mark.prometheus, pytest.mark.slow]

DOCS = Path(__file__).parents[2] / "docs"
RULES = (DOCS / "alerts.yml").read_text("utf-8")
#: Seconds after which a takeover counts as slow here: the limit of a bucket, instead of 300.
SLOW_TAKEOVER = 10.0

#: The alerts of each incident, with the label task, or "the worker" for one about all its tasks.
WITH_REDIS = {
    ("IdempotencyPoisoned", "shop.crash_looping"),
    ("IdempotencyTakeovers", "shop.crash_looping"),
    ("IdempotencyHeartbeatReplaced", "the worker"),
    ("IdempotencyTakeoverSlow", "shop.orphaned"),
    ("IdempotencyBeginSlow", "the worker"),
    ("IdempotencyRecordCorrupt", "shop.unreadable"),
    ("IdempotencyKeyReused", "shop.charge"),
    ("IdempotencyKeyRule", "shop.misruled"),
    ("IdempotencyCallInvalid", "shop.pack"),
    ("IdempotencyConflictStorm", "shop.raising"),
    ("IdempotencyLeaseLost", "shop.short_lease"),
    ("IdempotencyResultNotStored", "shop.unserialisable"),
}
WITHOUT_BROKER = {("IdempotencyBrokerUnavailable", "the worker")}
WITHOUT_REDIS = {
    ("IdempotencyStoreUnavailable", "the worker"),
    ("IdempotencyUnprotected", "shop.unguarded"),
    ("IdempotencyOutcomeUnsaved", "shop.unsaved"),
}


def shortened(rules: str) -> str:
    """Returns the rules without the times for which something must last.

    A begin is slow from two seconds on, since it may take one on a busy machine. The worker renews
    its messages every 5 seconds.
    """
    rules = re.sub(r"^ +for: .*\n", "", rules, flags=re.M)
    for original, changed in (
        ('le="300.0"', f'le="{SLOW_TAKEOVER}"'),
        ("[15m]", "[30s]"),
        ("> 0) > 120", "> 0) > 15"),
        ("begin_seconds_bucket[5m]))) > 1", "begin_seconds_bucket[5m]))) > 2"),
    ):
        assert original in rules
        rules = rules.replace(original, changed)
    return rules


@pytest.fixture(scope="module")
def proxy(server: RedisServer) -> Iterator[Proxy]:
    """Between the worker and the records; the results are reached without it."""
    with Proxy(server.url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def broker(server: RedisServer) -> Iterator[Proxy]:
    """Between all programs and the broker."""
    with Proxy(server.url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def shop(open_shop: Callable[..., Shop], proxy: Proxy, broker: Proxy, port: int) -> Iterator[Shop]:
    with open_shop(
        broker_url=f"{broker.url.rpartition('/')[0]}/198",
        idempotency_redis_url=f"{proxy.url.rpartition('/')[0]}/199",
        idempotency_metrics=f"127.0.0.1:{port}",
        idempotency_redeliver_after=15,
        **LOST_BROKER,
    ) as shop:
        shop.start_worker(concurrency=5)
        yield shop


@pytest.fixture(scope="module")
def prometheus(shop: Shop, port: int) -> Iterator[Prometheus]:
    with Prometheus.start(f"127.0.0.1:{port}", shortened(RULES)) as prometheus:
        eventually(
            lambda: prometheus.query("celery_idempotent_decisions_total"), "the first scrape"
        )
        yield prometheus


def wait_for_alerts(prometheus: Prometheus, expected: set[tuple[str, str]]) -> None:
    """Waits until these alerts have fired, and asserts that no others have."""
    with suppress(TimeoutError):
        eventually(lambda: expected <= prometheus.fired())
    prometheus.wait_for_evaluation()
    # Which of the leases that expire here are seen depends on the moment of a scrape.
    fired = {row for row in prometheus.fired() if row[0] != "IdempotencyLeaseExpired"}
    assert fired == expected


def cause_ordinary_traffic(shop: Shop, prometheus: Prometheus) -> None:
    order = uuid4().hex
    shop.ledger.hold(order)
    results = [pack.delay(order)]
    shop.ledger.wait_for_run(order)
    results += [pack.delay(order) for _ in range(2)]
    shop.ledger.wait_for_signal(results[1].id, "conflicted")
    os.kill(shop.ledger.runs(order)[0].pid, signal.SIGKILL)
    shop.ledger.wait_for_run(order, 2)
    shop.ledger.release(order)
    slow.delay(order).get(timeout=SOON)  # Prometheus needs a first value before it is slow
    failing = [flaky.delay(order, 1), final.delay(order)]
    for result in (*results, pack.delay(order)):
        result.get(timeout=SOON)
    for result in failing:
        result.get(timeout=SOON, propagate=False)

    wait_for_alerts(prometheus, set())


def cause_incidents(shop: Shop, proxy: Proxy, prometheus: Prometheus) -> None:
    order = uuid4().hex
    begin_elsewhere(orphaned, order)
    key = orphaned.idempotency_key_of(order)
    orphaned.idempotency_configuration.execute(
        commands.abandon(key, "the other", "elsewhere/1", grace_ms=0, reason="")
    )
    orphaned_at = time.monotonic()
    killer = crash_looping.delay(order)
    lose_lease(shop, prometheus, order)
    replace_heartbeat(prometheus)
    Redis.from_url(shop.settings["idempotency_redis_url"]).set(
        f"idem:{unreadable.idempotency_key_of(order)}", "no record"
    )
    unreadable.delay(order)
    misruled.delay("raises", order)
    shop.app.send_task("shop.pack", ("too", "many", "arguments"))
    charge.delay(order, 1).get(timeout=SOON)
    charge.delay(order, 2)
    unserialisable.delay(order)
    raise_conflicts(shop, order)
    delay_begins(shop, proxy)
    killer.get(timeout=SOON, propagate=False)
    # Redis' clock need not agree with this one to the millisecond.
    time.sleep(max(0.0, orphaned_at + SLOW_TAKEOVER + 0.5 - time.monotonic()))
    orphaned.delay(order).get(timeout=SOON)

    wait_for_alerts(prometheus, WITH_REDIS)


def lose_lease(shop: Shop, prometheus: Prometheus, order: str) -> None:
    """Freezes a process until its lease has expired, with an alert, and another has taken over."""
    first = shop.ledger.start(short_lease, order)
    frozen = shop.ledger.wait_for_run(order)
    os.kill(frozen.pid, signal.SIGSTOP)
    second = short_lease.delay(order)
    shop.ledger.wait_for_run(order, 2)
    expired = ("IdempotencyLeaseExpired", short_lease.name)
    eventually(lambda: expired in prometheus.fired(), "the expired lease raises its alert")
    os.kill(frozen.pid, signal.SIGCONT)
    shop.ledger.wait_for_signal(first.id, "lease_lost")
    shop.ledger.release(order)
    second.get(timeout=SOON)


def replace_heartbeat(prometheus: Prometheus) -> None:
    """Ends a heartbeat; the next task in that process detects it.

    Several are ended, because `crash_looping` may kill a process before its next task.
    """

    def replaced() -> bool:
        heartless.delay(uuid4().hex).get(timeout=SOON)
        for _ in range(10):
            pack.delay(uuid4().hex).get(timeout=SOON)
        return bool(prometheus.query("celery_idempotent_heartbeats_replaced_total > 0"))

    eventually(replaced, "another thread has replaced the heartbeat")


def raise_conflicts(shop: Shop, order: str) -> None:
    """Publishes many duplicates of a running task; each ends with ConflictError."""
    first = shop.ledger.start(raising, f"{order} raising")
    for result in [raising.delay(f"{order} raising") for _ in range(60)]:
        result.get(timeout=SOON, propagate=False)
    shop.ledger.release(f"{order} raising")
    first.get(timeout=SOON)


def delay_begins(shop: Shop, proxy: Proxy) -> None:
    """Delays begins by three seconds each; their executions end only after all have begun."""
    orders = [uuid4().hex for _ in range(4)]
    for order in orders:
        shop.ledger.hold(order)
        proxy.delay_reply(to="shop.slow", seconds=3.0)
    results = [slow.delay(order) for order in orders]
    for order in orders:
        shop.ledger.wait_for_run(order)
    shop.ledger.release_all()
    for result in results:
        result.get(timeout=SOON)


def cause_an_outage(shop: Shop, proxy: Proxy, prometheus: Prometheus) -> None:
    order = uuid4().hex
    held = shop.ledger.start(unsaved, order)
    proxy.refuse()
    shop.ledger.release(order)
    waiting = pack.delay(order)
    unguarded.delay(f"{order} unguarded").get(timeout=SOON)
    strict.delay(order).get(timeout=SOON, propagate=False)
    shop.ledger.wait_for_signal(waiting.id, "store_unavailable")
    held.get(timeout=SOON)
    shop.ledger.wait_for_signal(held.id, "outcome_unsaved")

    wait_for_alerts(prometheus, WITH_REDIS | WITHOUT_REDIS)
    proxy.heal()
    waiting.get(timeout=SOON)


def cause_an_outage_of_the_broker(shop: Shop, broker: Proxy, prometheus: Prometheus) -> None:
    broker.refuse()
    wait_for_alerts(prometheus, WITH_REDIS | WITHOUT_REDIS | WITHOUT_BROKER)
    broker.heal()
    pack.delay(uuid4().hex).get(timeout=SOON)


def assert_each_panel_shows_data(prometheus: Prometheus) -> None:
    panels = json.loads((DOCS / "grafana.json").read_text("utf-8"))["panels"]
    empty = []
    for panel in panels:
        for target in panel["targets"]:
            expression = target["expr"].replace("$task", ".*").replace("$__rate_interval", "5m")
            values = [sample["value"][1] for sample in prometheus.query(expression)]
            if all(value == "NaN" for value in values):
                empty.append((panel["title"], expression))
    assert empty == []


def assert_every_rule_has_fired(prometheus: Prometheus) -> None:
    rules: list[dict[str, Any]] = prometheus.rules()

    assert [rule["lastError"] for rule in rules if rule["health"] != "ok"] == []
    assert {name for name, _ in prometheus.fired()} == {rule["name"] for rule in rules}


@pytest.mark.timeout(400)
@pytest.mark.exhaustive
def test_each_incident_raises_its_alert_and_no_other(
    shop: Shop, proxy: Proxy, broker: Proxy, prometheus: Prometheus
) -> None:
    cause_ordinary_traffic(shop, prometheus)
    cause_incidents(shop, proxy, prometheus)
    cause_an_outage(shop, proxy, prometheus)
    cause_an_outage_of_the_broker(shop, broker, prometheus)
    assert_each_panel_shows_data(prometheus)
    assert_every_rule_has_fired(prometheus)
