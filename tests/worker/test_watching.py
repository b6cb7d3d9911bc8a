"""Events, metrics, log and inspect commands of a real prefork worker."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from cryptography.fernet import Fernet
from sqlalchemy import create_engine

from celery_idempotent import IdempotentTask
from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.operations.worker.bootstep import describe_settings
from tests.servers.program import Ports
from tests.waiting import SOON, eventually
from tests.worker import harness
from tests.worker.harness import Monitor, OpenShop, Shop, Worker, end_lease, scrape
from tests.worker.tasks import charge, labelled, misruled, pack, short_lease


@pytest.fixture(scope="module")
def shared_shop(open_shop: OpenShop, port: int) -> Iterator[Shop]:
    with open_shop(idempotency_metrics=f"127.0.0.1:{port}", idempotency_lease=30.0) as shop:
        shop.start_worker("--task-events", concurrency=2)
        yield shop


@pytest.fixture
def worker(shop: Shop) -> Iterator[Worker]:
    """The only worker, which has no message left after the test."""
    yield shop.workers[0]
    shop.wait_until_empty()


def inspect(shop: Shop, command: str) -> Any:
    """Returns the reply of the only worker to ``celery inspect``."""
    (reply,) = shop.control("broadcast", command)
    (value,) = reply.values()
    return value


def counts_of(shop: Shop, task: str) -> Counter[str]:
    """Returns the counts of a task when all its calls have been counted."""
    # A result is there before its call is counted; the message is acknowledged after that.
    shop.wait_until_empty()
    return Counter(inspect(shop, "idempotency_counts").get(task, {}))


def lease_of(shop: Shop, task_id: str) -> dict[str, Any]:
    """Returns the lease of one task; earlier tests may have left others."""
    leases = inspect(shop, "idempotency_leases")
    (lease,) = (lease for lease in leases if lease["task_id"] == task_id)
    return lease


def test_a_replay_sends_an_event_and_a_label_is_in_all_reports(
    shop: Shop, worker: Worker, monitor: Monitor, order: str
) -> None:
    label = f"order {order}"
    first = shop.ledger.start(labelled, order)
    assert lease_of(shop, first.id)["label"] == label
    shop.ledger.release(order)
    first.get(timeout=SOON)
    second = labelled.delay(order)

    event = monitor.wait_for("task-replayed", second.id)
    assert event["first_uuid"] == first.id
    assert event["key"] == str(labelled.idempotency_key_of(order))
    assert event["hostname"] == worker.name() + "@here"
    assert event["label"] == label
    monitor.wait_for("task-succeeded", second.id)
    assert monitor.state.tasks[second.id].state == "SUCCESS"
    worker.wait_for_log(f"({label}): task {second.id}")
    assert shop.ledger.wait_for_signal(first.id, "completed").details["label"] == label
    assert shop.ledger.wait_for_signal(second.id, "replayed").details["label"] == label
    assert labelled.idempotency_record(order).label == label


@pytest.mark.exhaustive
def test_events_are_sent_only_while_they_are_enabled(open_shop: OpenShop, monkeypatch: Any) -> None:
    # The default: a worker sends events about itself, and task events once they are enabled.
    monkeypatch.setattr(harness, "QUIET", ("--without-gossip", "--without-mingle"))
    with open_shop() as shop:
        shop.start_worker(concurrency=1)
        monitor = Monitor(shop)
        try:
            assert not sends_replay_event(shop, monitor)
            shop.control("enable_events")
            eventually(lambda: sends_replay_event(shop, monitor), "the worker sends events")
            shop.control("disable_events")
            eventually(lambda: not sends_replay_event(shop, monitor), "the worker sends no more")
        finally:
            monitor.stop()


def sends_replay_event(shop: Shop, monitor: Monitor) -> bool:
    """Whether the worker sends the event before a marker that is sent later."""
    charge.delay("events", 1).get(timeout=SOON)
    replay = charge.delay("events", 1)
    replay.get(timeout=SOON)
    with shop.app.events.default_dispatcher() as dispatcher:
        dispatcher.send("task-marked", uuid=replay.id)
    monitor.wait_for("task-marked", replay.id)
    return any((e["type"], e.get("uuid")) == ("task-replayed", replay.id) for e in monitor.received)


DECISIONS = 'celery_idempotent_decisions_total{{decision="{}",task="shop.pack"}}'
RENEWED = "celery_idempotent_messages_renewed_timestamp_seconds"


@pytest.mark.usefixtures("worker")
def test_metrics_have_decisions_and_begins_of_processes(shop: Shop, port: int, order: str) -> None:
    before = scrape(port)
    for number in range(6):
        charge.delay(f"{order} {number % 3}", 1).get(timeout=SOON)
    shop.wait_until_empty()  # a call is counted after its result is there
    after = scrape(port)

    def increase(metric: str, label: str) -> float:
        series = f'celery_idempotent_{metric}{{{label},task="shop.charge"}}'
        return after.get(series, 0) - before.get(series, 0)

    for decision, case in (("run", "begun"), ("replay", "finished")):
        assert increase("decisions_total", f'decision="{decision}"') == 3
        assert increase("begin_seconds_count", f'case="{case}"') == 3
        assert 0 < increase("begin_seconds_sum", f'case="{case}"') < 3 * SOON


@pytest.mark.usefixtures("worker")
def test_metrics_have_a_takeover_and_no_dead_lease(shop: Shop, port: int, order: str) -> None:
    name = 'celery_idempotent_takeover_seconds_count{task="shop.pack"}'
    before = scrape(port).get(name, 0)
    shop.ledger.hold(order)
    result = pack.delay(order)
    shop.ledger.kill(order)
    shop.ledger.wait_for_run(order, 2)

    values = scrape(port)
    assert values[name] == before + 1
    assert values["celery_idempotent_leases_held"] == 1
    shop.ledger.release(order)
    result.get(timeout=SOON)
    eventually(lambda: scrape(port)["celery_idempotent_leases_held"] == 0, "no lease is held")


def test_counters_are_served_before_there_is_anything_to_count(shop: Shop, port: int) -> None:
    values = scrape(port)

    for series in (
        'celery_idempotent_refused_total{reason="poisoned",task="shop.tick"}',
        'celery_idempotent_outcomes_total{outcome="outcome_unsaved",task="shop.tick"}',
        'celery_idempotent_decisions_total{decision="unprotected",task="shop.tick"}',
        'celery_idempotent_deduplicated_total{task="shop.tick"}',
        'celery_idempotent_takeover_seconds_bucket{le="300.0",task="shop.tick"}',
        "celery_idempotent_heartbeats_replaced_total",
    ):
        assert values[series] == 0


@pytest.mark.exhaustive
def test_a_restarted_worker_serves_metrics(open_shop: OpenShop, order: str, tmp_path: Path) -> None:
    with Ports(1) as ports, open_shop(idempotency_metrics=ports.numbers[0]) as shop:
        worker = shop.start_worker(concurrency=1, TMPDIR=str(tmp_path))
        pack.delay(order).get(timeout=SOON)
        worker.kill("SIGHUP")
        eventually(lambda: worker.logs().count("ready.") == 2, "the worker has restarted")

        pack.delay(f"{order} again").get(timeout=SOON)
        shop.wait_until_empty()

        address = f"http://127.0.0.1:{ports.numbers[0]}/metrics"
        assert worker.logs().count(address) == 2, "a port alone is not served to other machines"
        assert scrape(ports.numbers[0])[DECISIONS.format("run")] == 1
        assert len(list(tmp_path.glob("idempotency-metrics-*"))) == 1, "the first one is removed"


@pytest.mark.exhaustive
def test_spawned_processes_are_counted(open_shop: OpenShop, order: str, tmp_path: Path) -> None:
    with (
        Ports(1) as ports,
        open_shop(worker_pool_start_method="spawn", idempotency_metrics=ports.numbers[0]) as shop,
    ):
        worker = shop.start_worker(TMPDIR=str(tmp_path))
        for _ in range(3):
            pack.delay(order).get(timeout=SOON)

        assert counts_of(shop, "shop.pack") == {"run": 1, "completed": 1, "replay": 2}
        assert scrape(ports.numbers[0])[DECISIONS.format("replay")] == 2
        worker.container.stop()
        assert list(tmp_path.iterdir()) == []


def by_order(order_id: int = 0) -> None: ...


def test_log_at_start(worker: Worker) -> None:
    lines = worker.logs().splitlines()
    (stores,) = (line for line in lines if "idempotent tasks" in line)
    (weakness,) = (line for line in lines if "weakens idempotency" in line)

    assert "records at redis://127.0.0.1:" in stores
    assert "nothing is written to disk" in weakness
    assert "appendonly yes" in weakness
    assert re.search(r"shop\.short_lease: key by .*, lease 2(,|$)", worker.logs(), re.MULTILINE)
    assert "shop.open_door: unprotected" in worker.logs()


def test_tasks_with_one_rule_and_mode_have_one_line_in_the_log_at_start() -> None:
    app = Celery("shop", broker="redis://", backend="redis://", set_as_current=False)
    app.finalized = True  # without the shared tasks of other tests
    for name, options in {
        "charge": {"idempotency_key": "order:{order_id}", "acks_late": True},
        "index": {"idempotency_until": "started", "idempotency_debounce": 2},
        "search": {"idempotency_until": "started", "idempotency_debounce": 2.0},
        "bill": {"idempotency_transaction": create_engine("sqlite://")},
        "pay": {
            "idempotency_offload_backend": "file:///tmp/secret",
            "idempotency_encryption_keys": [Fernet.generate_key()],
        },
        "ship": {"idempotency_lease": 5, "idempotency_label": "order {order_id}"},
        "tidy": {"idempotency_enabled": False},
        "watch": {"idempotency_shadow": True},
    }.items():
        app.task(by_order, base=IdempotentTask, name=name, lazy=False, shared=False, **options)

    burst = "until started, reservation_ttl 3602, debounce 2"
    assert list(describe_settings(app_tasks.tasks(app)))[1:] == [
        "bill: key by all arguments, serializer json, transaction in sqlite",
        "charge: key by the template 'order:{order_id}', serializer json",
        f"index, search: key by all arguments, {burst}, serializer json",
        "pay: key by all arguments, serializer json, encrypted, offload to file",
        "ship: key by all arguments, lease 5, serializer json, label order {order_id}",
        "tidy: unprotected (idempotency_enabled is False)",
        "watch: key by all arguments, serializer json, in shadow (every call runs)",
    ]


def test_inspect_returns_a_lease(shop: Shop, worker: Worker, port: int, order: str) -> None:
    result = shop.ledger.start(pack, order)
    run = shop.ledger.wait_for_run(order)

    lease = lease_of(shop, result.id)
    assert lease["task"] == "shop.pack"
    assert (lease["pid"], lease["key"], lease["token"]) == (run.pid, run.key, run.token)
    assert (lease["attempt"], lease["heartbeat"]) == (1, "healthy")
    assert 0 < lease["trusted_seconds"] <= 0.95 * 30
    assert lease["extended_seconds_ago"] == pytest.approx(lease["held_seconds"], abs=0.1)

    end_lease(pack, order)
    lease = lease_of(shop, result.id)
    assert (lease["heartbeat"], lease["trusted_seconds"]) == ("expired", 0)
    served = scrape(port)
    assert served['celery_idempotent_leases_expired{task="shop.pack"}'] == 1
    eventually(lambda: time.time() - scrape(port)[RENEWED] < SOON, "the messages are renewed")
    shop.ledger.release(order)
    result.get(timeout=SOON)


def test_inspect_returns_findings(shop: Shop) -> None:
    names = {finding["name"] for finding in inspect(shop, "idempotency_doctor")}

    assert {"persistence", "fail-open", "recovery"} <= names


CALLS = 40


def test_a_refused_call_is_one_line_with_one_traceback_a_minute(shop: Shop, order: str) -> None:
    (worker,) = shop.workers
    worker.new_logs()
    results = [misruled.delay("raises", f"{order}-{number}") for number in range(CALLS)]
    for result in results:
        result.get(timeout=SOON, propagate=False)
    for result in results:
        worker.wait_for_log(f"[{result.id}] raised unexpected")

    lines = worker.new_logs().splitlines()
    for result in results:
        about = [line for line in lines if result.id in line and " received" not in line]
        assert len(about) == 1, about
        assert "raised unexpected: KeyRuleError" in about[0]
    processes = {name for line in lines for name in re.findall(r": ERROR/([\w-]+)\]", line)}
    starts = sum(line.startswith("Traceback") for line in lines)
    # That of the error, and that of its cause; another test may have logged it in this minute.
    assert starts <= len(processes) * 2
    assert len(processes) < CALLS / 4


def test_a_record_that_is_gone_is_not_a_lost_lease(shop: Shop, order: str) -> None:
    (worker,) = shop.workers
    worker.new_logs()
    result = shop.ledger.start(short_lease, order)
    store = short_lease.idempotency_configuration.executor.store
    store.client.delete(store.name(short_lease.idempotency_key_of(order)))
    worker.wait_for_log("has lost its record, which Redis has evicted or deleted")
    shop.ledger.release(order)
    result.get(timeout=SOON)

    assert "has lost its lease" not in worker.new_logs()
    assert shop.ledger.wait_for_signal(result.id, "lease_lost")
