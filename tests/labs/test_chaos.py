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
@pytest.mark.parametrize("transaction", [False, pytest.param(True, marks=pytest.mark.postgresql)])
def test_no_call_is_lost_and_all_callers_get_one_outcome(transaction: bool, tmp_path: Path) -> None:
    verdict = runner.run(RunSpec(SEED, OURS.name, CALLS, transaction=transaction), tmp_path)

    assert verdict.keeps_promises, verdict
    assert verdict.calls >= CALLS
    assert verdict.faults >= 2
    assert verdict.transaction is transaction
    if transaction:
        assert not verdict.duplicates, "effects in a database"
    else:
        assert verdict.orders <= verdict.executions
        assert {"begin", "settle", "queue"} <= set(verdict.late)
