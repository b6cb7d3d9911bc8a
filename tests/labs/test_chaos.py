"""Tests of schedules, and one run of ``make chaos`` with few calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from labs.chaos import runner
from labs.chaos.run import RunSpec
from labs.comparison.contestants import OURS

#: A seed without RabbitMQ, which may not be installed; results are in the store.
SEED, CALLS = 12, 100


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
    assert verdict.faults >= 2
