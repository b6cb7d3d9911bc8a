"""The log and the inspect commands of a real prefork worker."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, signals
from celery_idempotent.configuration import app_tasks
from celery_idempotent.dashboard.sampler import Sampler
from celery_idempotent.monitoring.bootstep import describe_settings
from celery_idempotent.store import commands
from celery_idempotent.store.run_sync import run_sync
from tests import command_line
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop, Worker
from tests.worker.monitor import Monitor
from tests.worker.tasks import (
    SHORT_LEASE,
    charge,
    misruled,
    pack,
    short_lease,
    short_lease_waiting,
)
from tests.worker.watching.reading import counts_of, inspect, kill, lease_of

pytestmark = [pytest.mark.worker, pytest.mark.xdist_group("watching")]


def tidy() -> None: ...


def by_order(order_id: int = 0) -> None: ...


class TestLogAtStart:
    def test_one_line_has_the_stores(self, worker: Worker) -> None:
        (line,) = (line for line in worker.logs().splitlines() if "idempotent tasks" in line)

        assert "records at redis://127.0.0.1:" in line

    def test_tasks_with_one_rule_and_mode_have_one_line(self) -> None:
        app = Celery("shop", broker="redis://", backend="redis://", set_as_current=False)
        app.finalized = True  # without the shared tasks of other tests
        for name, options in {
            "charge": {"idempotency_key": "order:{order_id}", "acks_late": True},
            "index": {"idempotency_until": "started"},
            "search": {"idempotency_until": "started", "idempotency_lease": 60},
            "ship": {"idempotency_lease": 5},
            "tidy": {"idempotency_enabled": False},
            "watch": {"idempotency_shadow": True},
        }.items():
            app.task(by_order, base=IdempotentTask, name=name, lazy=False, shared=False, **options)

        assert list(describe_settings(app_tasks.tasks(app)))[1:] == [
            "charge: key by the template 'order:{order_id}'",
            "index, search: key by all arguments, until started",
            "ship: key by all arguments, lease 5",
            "tidy: unprotected (idempotency_enabled is False)",
            "watch: in shadow (every call runs), key by all arguments",
        ]

    def test_secrets_are_not_logged(self) -> None:
        app = Celery("shop", set_as_current=False)
        app.conf.update(
            broker_url="redis://:secret@localhost:1/0",
            result_backend="redis://:secret@localhost:1/0",
            idempotency_redis_options={"password": "secret"},
        )
        app.task(tidy, base=IdempotentTask, name="shop.tidy", lazy=False, shared=False)

        text = "\n".join(describe_settings(app_tasks.tasks(app)))

        assert "redis://localhost:1/0" in text
        assert "secret" not in text

    def test_a_task_with_other_settings_has_a_line(self, worker: Worker) -> None:
        lines = worker.logs()

        assert re.search(r"shop\.short_lease: key by .*, lease 2(,|$)", lines, re.MULTILINE)
        assert "shop.open_door: unprotected" in lines

    def test_each_finding_is_one_line(self, worker: Worker) -> None:
        warnings = [line for line in worker.logs().splitlines() if "weakens idempotency" in line]

        assert len(warnings) == 1
        assert "nothing is written to disk" in warnings[0]
        assert "appendonly yes" in warnings[0]


class TestInspect:
    def test_returns_a_lease(self, shop: Shop, worker: Worker, order: str) -> None:
        shop.ledger.hold(order)
        result = pack.delay(order)
        run = shop.ledger.wait_for_run(order)

        lease = lease_of(shop, result.id)

        assert lease["task"] == "shop.pack"
        assert (lease["pid"], lease["key"], lease["token"]) == (run.pid, run.key, run.token)
        assert lease["attempt"] == 1
        assert lease["heartbeat"] == "healthy"
        assert 0 < lease["trusted_seconds"] <= 0.95 * 30
        assert lease["extended_seconds_ago"] == pytest.approx(lease["held_seconds"], abs=0.1)

    @pytest.mark.parametrize(
        "spread",
        [
            lambda order: pack.map(["first", order, "last"]),
            lambda order: pack.starmap([("first",), (order,), ("last",)]),
            lambda order: pack.chunks([("first",), (order,), ("last",)], 3),
        ],
        ids=["map", "starmap", "chunks"],
    )
    def test_returns_the_lease_of_the_running_item(
        self, shop: Shop, order: str, spread: Callable[[str], Any]
    ) -> None:
        shop.ledger.hold(order)
        spread(order).apply_async()
        run = shop.ledger.wait_for_run(order)

        leases = inspect(shop, "idempotency_leases")
        (lease,) = (lease for lease in leases if lease["pid"] == run.pid)

        assert lease["task"] == "shop.pack"
        assert (lease["key"], lease["token"]) == (run.key, run.token)

    def test_reports_a_healthy_heartbeat(self, shop: Shop, order: str) -> None:
        shop.ledger.hold(order)
        result = short_lease.delay(order)
        shop.ledger.wait_for_run(order)

        def extended() -> Any:
            lease = lease_of(shop, result.id)
            assert lease["heartbeat"] == "healthy"
            return lease["extended_seconds_ago"] < lease["held_seconds"] - 0.3

        eventually(extended, "the lease is extended")

    def test_reports_an_expired_lease(self, shop: Shop, order: str) -> None:
        shop.ledger.hold(order)
        result = pack.delay(order)
        shop.ledger.wait_for_run(order)
        key = pack.idempotency_key_of(order)
        store = pack.idempotency_configuration.executor.store
        record = pack.idempotency_record(order)
        run_sync(
            store.execute(
                commands.abandon(key, record.task_id, record.worker, root=bytes(8), grace_ms=0)
            )
        )

        lease = lease_of(shop, result.id)

        assert lease["heartbeat"] == "expired"
        assert lease["trusted_seconds"] == 0

    def test_a_duplicate_that_waits_has_no_lease(self, shop: Shop, order: str) -> None:
        shop.ledger.hold(order)
        ids = {short_lease_waiting.delay(order).id for _ in range(2)}
        run = shop.ledger.wait_for_run(order)

        def active_longer_than_a_lease() -> bool:
            began = [call["time_start"] for call in inspect(shop, "active") if call["id"] in ids]
            return len(began) == 2 and time.time() - max(began) > SHORT_LEASE

        eventually(active_longer_than_a_lease)
        leases = inspect(shop, "idempotency_leases")

        assert [lease["task_id"] for lease in leases if lease["task_id"] in ids] == [run.task_id]

    def test_returns_no_leases_where_none_is_held(self, shop: Shop) -> None:
        eventually(lambda: inspect(shop, "idempotency_leases") == [], "no lease is held")

    def test_counts_include_all_processes(self, shop: Shop, order: str) -> None:
        before = counts_of(shop, "shop.charge")
        for _ in range(5):
            charge.delay(order, 1).get(timeout=SOON)

        after = counts_of(shop, "shop.charge")

        assert after - before == {"run": 1, "completed": 1, "replay": 4}

    def test_counts_continue_after_a_process_has_died(self, shop: Shop, order: str) -> None:
        before = counts_of(shop, "shop.pack")
        shop.ledger.hold(order)
        result = pack.delay(order)
        kill(shop, order)
        shop.ledger.wait_for_run(order, 2)
        shop.ledger.release(order)
        result.get(timeout=SOON)

        after = counts_of(shop, "shop.pack")

        assert after - before == {"run": 1, "completed": 1, "takeover": 1}

    def test_decisions_sum_to_the_deliveries(
        self, shop: Shop, monitor: Monitor, order: str
    ) -> None:
        def decisions() -> int:
            counts = inspect(shop, "idempotency_counts").values()
            return sum(task.get(name, 0) for task in counts for name in signals.DECISIONS)

        before, paid = decisions(), f"{order} paid"
        charge.delay(paid, 1).get(timeout=SOON)
        shop.ledger.hold(order)
        results = [pack.delay(order)]
        kill(shop, order)
        shop.ledger.wait_for_run(order, 2)
        duplicate = pack.delay(order)
        shop.ledger.wait_for_signal(duplicate.id, "conflicted", number=2)
        shop.ledger.release(order)
        results += [duplicate, pack.delay(order), charge.delay(paid, 1), charge.delay(paid, 2)]
        results += [
            misruled.delay("raises", order),
            shop.app.send_task("shop.pack", (order, "too", "many")),
        ]
        for result in results:
            result.get(timeout=SOON, propagate=False)
        shop.wait_until_empty()
        with shop.app.events.default_dispatcher() as dispatcher:
            dispatcher.send("task-marked", uuid=order)
        monitor.wait_for("task-marked", order)

        deliveries = sum(event["type"] == "task-started" for event in monitor.received)
        assert deliveries >= 11
        assert decisions() - before == deliveries

    def test_returns_findings(self, shop: Shop) -> None:
        names = {finding["name"] for finding in inspect(shop, "idempotency_doctor")}

        assert {"persistence", "fail-open", "recovery"} <= names

    def test_a_key_rule_that_has_raised_is_found(self, shop: Shop, order: str) -> None:
        misruled.delay("raises", order).get(timeout=SOON, propagate=False)

        (by_worker,) = (
            f for f in inspect(shop, "idempotency_doctor") if f["name"] == "rule-raised"
        )
        findings = json.loads(command_line.run(shop.app, "doctor", "--json", code=1))["findings"]

        sampler = Sampler(shop.app, "")
        sampler.start()
        shown = [finding.to_json() for finding in sampler.findings()]
        sampler.close()

        assert by_worker in findings
        assert by_worker in shown
        assert (by_worker["subject"], by_worker["severity"]) == ("shop.misruled", "error")
        assert re.match(r"no key could be derived for [1-9]\d* of its calls ", by_worker["what"])
