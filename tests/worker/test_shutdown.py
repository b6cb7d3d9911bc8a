"""A worker is interrupted, and the next one processes its message; `test_redelivery` has more."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_idempotent import State
from tests.conftest import exhaustive_except
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.tasks import pack


@pytest.mark.parametrize("pool", exhaustive_except(["prefork", "gevent", "eventlet"], "prefork"))
def test_interrupted_task_runs_again(open_shop: Callable[..., Shop], order: str, pool: str) -> None:
    with open_shop() as shop:
        worker = shop.start_worker("--pool", pool)
        result = shop.ledger.start(pack, order)
        worker.kill("SIGQUIT")
        worker.wait_for_exit()
        stopped_at = time.time()

        shop.ledger.release(order)
        shop.start_worker()
        duplicate = pack.delay(order)
        # A dying worker with greenlets may take the message again, and keep the lease of 60 s.
        receipt = eventually(lambda: result.successful() and result.result, "success", 60 + SOON)
        assert duplicate.get(timeout=SOON) == receipt
        first, *others, last = shop.ledger.runs(order)
        ends = {None, "SystemExit", "GreenletExit"}
        assert ({run.end for run in (first, *others)} <= ends, last.end) == (True, "returned")
        assert pool != "prefork" or last.started_at - stopped_at < 30, "before it expires"
        assert pack.idempotency_record(order).state is State.COMPLETED
