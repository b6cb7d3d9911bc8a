"""Fused completion with real workers: the result outlives the process that has written it."""

from __future__ import annotations

import pytest

from celery_idempotent import State
from tests.waiting import SOON
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import pack

pytestmark = pytest.mark.worker


def test_it_is_on_by_itself(shop: Shop) -> None:
    lines = shop.workers[0].logs().splitlines()
    (line,) = (line for line in lines if "shop.pack" in line and ": key by " in line)
    assert "fused completion off" not in line
    assert pack.idempotency_configuration.fusion_obstacle == ""


@pytest.mark.core
def test_a_process_that_is_killed_after_the_write(shop: Shop, ledger: Ledger, order: str) -> None:
    ledger.hold(order)
    result = pack.delay(order)
    ledger.wait_for_run(order)
    ledger.kill_once("before", result.id)
    ledger.release(order)

    receipt = result.get(timeout=SOON)
    shop.wait_until_empty()

    (run,) = ledger.runs(order)
    assert receipt["receipt"]
    record = pack.idempotency_record(order)
    assert record is not None
    assert (record.state, record.result, record.token) == (State.COMPLETED, receipt, run.token)
    # The message is acknowledged, since Celery finds the success, or its redelivery is a replay.
    assert shop.app.AsyncResult(result.id).result == receipt
