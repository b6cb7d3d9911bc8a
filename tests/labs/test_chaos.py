"""Tests of schedules, and one run of ``make chaos`` with few calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from labs.chaos import runner, schedule
from labs.chaos.run import RunSpec
from labs.chaos.schedule import LEASE
from labs.comparison.contestants import OURS
from labs.rig.late import SCRIPTS

#: A seed without RabbitMQ, which may not be installed; results are in the store.
SEED, CALLS = 12, 100
SEEDS = range(1, 21)


class TestSchedule:
    def test_is_a_function_of_its_seed(self) -> None:
        assert schedule.make(7, 100) == schedule.make(7, 100)
        assert schedule.make(7, 100).faults != schedule.make(8, 100).faults

    def test_twenty_seeds_have_every_fault_and_every_shape(self) -> None:
        schedules = [schedule.make(seed, 1000) for seed in SEEDS]

        for each in schedules:
            late = {(packet.name, packet.kills, packet.seconds > LEASE) for packet in each.late}
            assert len(late) >= 3 * len(SCRIPTS)
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


@pytest.mark.worker
@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_call_is_lost_and_all_callers_get_one_outcome(tmp_path: Path) -> None:
    verdict = runner.run(RunSpec(SEED, OURS.name, CALLS), tmp_path)

    assert verdict.keeps_promises, verdict
    assert verdict.calls >= CALLS
    assert verdict.orders <= verdict.executions
    assert verdict.faults >= 2
    assert {"begin", "settle", "queue"} <= set(verdict.late)


@pytest.mark.worker
@pytest.mark.postgresql
@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_effect_in_a_database_is_duplicated(tmp_path: Path) -> None:
    spec = RunSpec(SEED, OURS.name, CALLS, transaction=True)

    verdict = runner.run(spec, tmp_path)

    assert verdict.keeps_promises, verdict
    assert verdict.transaction
    assert not verdict.duplicates
    assert verdict.calls >= CALLS
    assert verdict.faults >= 11
