"""Tests of schedules, and one run of ``make chaos`` with few calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from labs.chaos import runner, schedule, timeline
from labs.chaos.runner import RunSpec
from labs.chaos.schedule import ROLLED_BACK, ROLLED_FORWARD, STORE_KILLED
from labs.comparison.contestants import OURS

#: A seed without RabbitMQ, which may not be installed; results are in the store.
SEED, CALLS = 12, 100
SEEDS = range(1, 21)


class TestSchedule:
    def test_is_a_function_of_its_seed(self) -> None:
        assert schedule.make(7, 100) == schedule.make(7, 100)
        assert schedule.make(7, 100).faults != schedule.make(8, 100).faults

    def test_twenty_seeds_have_every_fault_and_every_shape(self) -> None:
        schedules = [schedule.make(seed, 1000) for seed in SEEDS]

        kinds = {fault.kind for each in schedules for fault in each.faults}
        assert len(kinds) == 19
        shapes = {(p.shape.broker, p.shape.store, p.shape.wait_replicas) for p in schedules}
        assert len(shapes) == 10
        single = {
            (p.shape.broker, p.shape.results_in_store)
            for p in schedules
            if p.shape.store == "single"
        }
        assert len(single) == 4
        assert not any(p.shape.results_in_store for p in schedules if p.shape.store != "single")

    def test_every_seed_kills_the_store_and_a_worker(self) -> None:
        for seed in range(20):
            kinds = {fault.kind for fault in schedule.make(seed, CALLS).faults}
            assert kinds >= {STORE_KILLED, "worker killed"}

    def test_effects_in_a_database_add_faults_to_the_same_calls(self) -> None:
        pairs = [(schedule.make(n, 1000), schedule.make(n, 1000, transaction=True)) for n in SEEDS]

        for plain, with_transaction in pairs:
            assert with_transaction.calls == plain.calls
            assert set(with_transaction.faults) > set(plain.faults)
        shapes = [with_transaction.shape for _, with_transaction in pairs]
        for store_and_broker in ("single", "sentinel", "cluster"), ("redis", "rabbitmq"):
            running = {
                value
                for shape in shapes
                for value in (shape.store, shape.broker)
                if shape.runs_without_store
            }
            assert running >= set(store_and_broker)
        assert {shape.idle_timeout for shape in shapes} == {False, True}

    def test_versions_take_turns_under_the_same_faults(self) -> None:
        plain, versions = schedule.make(7, 1000), schedule.make(7, 1000, versions=True)

        assert versions.calls == plain.calls
        rolls = [fault for fault in versions.faults if fault not in plain.faults]
        assert [fault.kind for fault in rolls] == [ROLLED_FORWARD, ROLLED_BACK]
        assert len(versions.faults) == len(plain.faults) + 2

    def test_with_fewer_orders_keeps_all_their_calls(self) -> None:
        whole = schedule.make(7, 100)
        part = whole.with_orders(4)

        assert part.orders == whole.orders / 4
        orders = {call.order for call in part.calls}
        assert part.calls == tuple(call for call in whole.calls if call.order in orders)
        assert part.faults == whole.faults


@pytest.mark.worker
@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_call_is_lost_and_all_callers_get_one_outcome(tmp_path: Path) -> None:
    answered: list[int] = []
    spec = RunSpec(SEED, OURS.name, CALLS)

    verdict = runner.run(spec, tmp_path, answered.append)

    assert verdict.keeps_promises, verdict
    assert verdict.calls == CALLS
    assert verdict.orders <= verdict.executions
    assert verdict.faults == 2
    assert answered[-1] == CALLS - verdict.unanswered - verdict.collapsed
    assert OURS.name in timeline.draw(SEED, CALLS, tmp_path).read_text(encoding="utf-8")


@pytest.mark.worker
@pytest.mark.postgresql
@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_effect_in_a_database_is_duplicated(tmp_path: Path) -> None:
    spec = RunSpec(SEED, OURS.name, CALLS, transaction=True)

    verdict = runner.run(spec, tmp_path, lambda answered: None)

    assert verdict.keeps_promises, verdict
    assert verdict.transaction
    assert not verdict.duplicates
    assert verdict.calls == CALLS
    assert verdict.faults == 11
