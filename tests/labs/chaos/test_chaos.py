"""A part of ``make chaos``: one seed, few calls; and schedules are what they say they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.labs.chaos import picture, runner, schedule
from tests.labs.chaos.runner import Entry
from tests.labs.chaos.schedule import STORE_KILLED
from tests.labs.comparison.contestants import OURS

#: Redis everywhere: it is what every machine has that runs the tests.
SEED, CALLS = 12, 100


class TestASchedule:
    def test_is_a_function_of_its_seed(self) -> None:
        assert schedule.make(7, 100) == schedule.make(7, 100)
        assert schedule.make(7, 100).blows != schedule.make(8, 100).blows

    def test_has_every_kind_of_fault_and_of_process_within_twenty_seeds(self) -> None:
        planned = [schedule.make(seed, 1000) for seed in range(1, 21)]

        discovery = {blow.kind for each in planned for blow in each.blows}
        assert len(discovery) == 19
        shapes = {(p.shape.broker, p.shape.store, p.shape.wait_replicas) for p in planned}
        assert len(shapes) == 10

    def test_strikes_the_store_and_a_worker_whatever_the_seed(self) -> None:
        for seed in range(20):
            discovery = {blow.kind for blow in schedule.make(seed, CALLS).blows}
            assert discovery >= {STORE_KILLED, "worker killed"}

    def test_in_part_has_all_calls_of_the_orders_that_are_left(self) -> None:
        whole = schedule.make(7, 100)
        part = whole.part(4)

        assert part.orders == whole.orders / 4
        orders = {call.order for call in part.calls}
        assert part.calls == tuple(call for call in whole.calls if call.order in orders)
        assert part.blows == whole.blows


@pytest.mark.worker
@pytest.mark.slow
def test_nothing_is_lost_and_all_callers_see_one_outcome(tmp_path: Path) -> None:
    begin_replied: list[int] = []
    entry = Entry(SEED, OURS.name, CALLS)

    verdict = runner.run(entry, tmp_path, begin_replied.append)

    assert verdict.faultless, verdict
    assert verdict.calls == CALLS
    assert verdict.orders <= verdict.executions
    assert verdict.faults == 2
    assert begin_replied[-1] == CALLS - verdict.unanswered
    assert OURS.name in picture.draw(SEED, CALLS, tmp_path).read_text(encoding="utf-8")
