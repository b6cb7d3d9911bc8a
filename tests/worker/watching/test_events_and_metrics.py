"""The events and metrics of a real prefork worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.servers.ports import Ports
from tests.waiting import SOON, eventually
from tests.worker import harness
from tests.worker.harness import Shop, Worker
from tests.worker.monitor import Monitor
from tests.worker.tasks import charge, labelled, pack, raising
from tests.worker.watching.reading import kill, lease_of

pytestmark = [pytest.mark.worker, pytest.mark.xdist_group("watching")]


class TestEvents:
    def test_a_replay_sends_an_event(self, shop: Shop, monitor: Monitor, order: str) -> None:
        first = pack.delay(order)
        first.get(timeout=SOON)
        second = pack.delay(order)

        event = monitor.wait_for("task-replayed", second.id)
        assert event["first_uuid"] == first.id
        assert event["key"] == str(pack.idempotency_key_of(order))
        assert event["hostname"] == shop.workers[0].name() + "@here"
        monitor.wait_for("task-succeeded", second.id)
        assert monitor.state.tasks[second.id].state == "SUCCESS"

    def test_a_label_is_in_events_log_lines_signals_and_leases(
        self, shop: Shop, worker: Worker, monitor: Monitor, order: str
    ) -> None:
        label = f"order {order}"
        shop.ledger.hold(order)
        first = labelled.delay(order)
        shop.ledger.wait_for_run(order)
        assert lease_of(shop, first.id)["label"] == label
        shop.ledger.release(order)
        first.get(timeout=SOON)
        second = labelled.delay(order)

        assert monitor.wait_for("task-replayed", second.id)["label"] == label
        worker.wait_for_log(f"({label}): task {second.id}")
        assert shop.ledger.wait_for_signal(first.id, "completed").details["label"] == label
        assert shop.ledger.wait_for_signal(second.id, "replayed").details["label"] == label
        assert labelled.idempotency_record(order).label == label

    def test_a_conflict_sends_an_event(self, shop: Shop, monitor: Monitor, order: str) -> None:
        shop.ledger.hold(order)
        first = raising.delay(order)
        shop.ledger.wait_for_run(order)
        second = raising.delay(order)

        event = monitor.wait_for("task-conflicted", second.id)
        assert (event["holder_uuid"], event["policy"]) == (first.id, "raise")

    def test_a_takeover_sends_an_event(self, shop: Shop, monitor: Monitor, order: str) -> None:
        shop.ledger.hold(order)
        result = pack.delay(order)
        kill(shop, order)
        shop.ledger.wait_for_run(order, 2)

        assert monitor.wait_for("task-taken-over", result.id)["attempt"] == 2
        eventually(
            lambda: monitor.state.tasks[result.id].state == "TAKEN-OVER", "the monitor shows it"
        )


@pytest.mark.exhaustive
def test_events_are_sent_only_while_they_are_enabled(
    open_shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The default: a worker sends events about itself, and task events once they are enabled.
    monkeypatch.setattr(harness, "QUIET", ("--without-gossip", "--without-mingle"))
    with open_shop() as shop:
        shop.start_worker(concurrency=1)
        monitor = Monitor(shop)
        try:
            assert not sends_replay_event(shop, monitor)
            shop.app.control.enable_events(reply=True, timeout=SOON, limit=1)
            eventually(lambda: sends_replay_event(shop, monitor), "the worker sends events")
            shop.app.control.disable_events(reply=True, timeout=SOON, limit=1)
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


class TestMetrics:
    def scrape(self, port: int) -> dict[str, float]:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SOON) as response:
            lines = response.read().decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines)
            if not name.startswith("#")
        }

    def test_decisions_of_all_processes_are_counted(
        self, shop: Shop, port: int, order: str
    ) -> None:
        before = self.scrape(port)
        for number in range(6):
            charge.delay(f"{order} {number % 3}", 1).get(timeout=SOON)
        after = self.scrape(port)

        def increase(decision: str) -> float:
            name = "celery_idempotent_decisions_total"
            label = f'{name}{{decision="{decision}",task="shop.charge"}}'
            return after.get(label, 0) - before.get(label, 0)

        assert (increase("run"), increase("replay")) == (3, 3)

    def test_the_duration_of_begins_is_measured(self, shop: Shop, port: int, order: str) -> None:
        pack.delay(order).get(timeout=SOON)
        pack.delay(order).get(timeout=SOON)

        values = self.scrape(port)

        for case in ("begun", "finished"):
            labels = f'{{case="{case}",task="shop.pack"}}'
            count = values[f"celery_idempotent_begin_seconds_count{labels}"]
            assert count >= 1
            assert 0 < values[f"celery_idempotent_begin_seconds_sum{labels}"] < count * SOON

    def test_a_takeover_is_measured_and_a_dead_process_holds_nothing(
        self, shop: Shop, port: int, order: str
    ) -> None:
        name = 'celery_idempotent_takeover_seconds_count{task="shop.pack"}'
        before = self.scrape(port).get(name, 0)
        shop.ledger.hold(order)
        result = pack.delay(order)
        kill(shop, order)
        shop.ledger.wait_for_run(order, 2)

        values = self.scrape(port)
        assert values[name] == before + 1
        assert values["celery_idempotent_leases_held"] == 1
        shop.ledger.release(order)
        result.get(timeout=SOON)
        eventually(
            lambda: self.scrape(port)["celery_idempotent_leases_held"] == 0, "no lease is held"
        )

    def test_counters_are_served_before_there_is_anything_to_count(
        self, shop: Shop, port: int
    ) -> None:
        values = self.scrape(port)

        for series in (
            'celery_idempotent_refused_total{reason="poisoned",task="shop.tick"}',
            'celery_idempotent_outcomes_total{outcome="outcome_unsaved",task="shop.tick"}',
            'celery_idempotent_decisions_total{decision="unprotected",task="shop.tick"}',
            'celery_idempotent_deduplicated_total{task="shop.tick"}',
            'celery_idempotent_takeover_seconds_bucket{le="300.0",task="shop.tick"}',
            "celery_idempotent_heartbeats_replaced_total",
        ):
            assert values[series] == 0

    def test_outcomes_are_counted(self, shop: Shop, port: int, order: str) -> None:
        pack.delay(order).get(timeout=SOON)

        label = 'celery_idempotent_outcomes_total{outcome="completed",task="shop.pack"}'
        assert self.scrape(port)[label] >= 1


@pytest.mark.exhaustive
def test_a_worker_that_is_restarted_by_a_signal_serves_metrics(
    open_shop: Callable[..., Shop], order: str, tmp_path: Path
) -> None:
    with Ports(1) as ports, open_shop(idempotency_metrics=ports.numbers[0]) as shop:
        worker = shop.start_worker(concurrency=1, TMPDIR=str(tmp_path))
        pack.delay(order).get(timeout=SOON)
        worker.kill("SIGHUP")
        eventually(lambda: worker.logs().count("ready.") == 2, "the worker has restarted")

        pack.delay(f"{order} again").get(timeout=SOON)
        shop.wait_until_empty()

        address = f"http://127.0.0.1:{ports.numbers[0]}/metrics"
        assert worker.logs().count(address) == 2, "a port alone is not served to other machines"
        with urlopen(address, timeout=SOON) as response:
            text = response.read().decode()
        assert 'decisions_total{decision="run",task="shop.pack"} 1.0' in text
        assert len(list(tmp_path.glob("idempotency-metrics-*"))) == 1, "the first one is removed"
