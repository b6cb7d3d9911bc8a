"""Warm, soft and cold shutdowns: every message is processed, by this worker or the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import celery
import pytest

from celery_idempotent import State
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.tasks import pack

pytestmark = pytest.mark.worker

CELERY = tuple(map(int, celery.__version__.split(".")[:2]))
#: In seconds.
SOFT_TIMEOUT = 2.0


@pytest.fixture(scope="module")
def shared_shop(open_shop: Callable[..., Shop]) -> Iterator[Shop]:
    """A shop without a worker; each test has its own worker and queue."""
    with open_shop() as shop:
        yield shop


def run_then_stop(
    shop: Shop, order: str, signal: str, task: Any = pack, pool: str = "prefork", **environment: str
) -> tuple[Any, Any]:
    """Starts a worker on a queue named like the order, and stops it during an execution."""
    worker = shop.start_worker("--queues", order, "--pool", pool, **environment)
    result = shop.ledger.start(task, order, queue=order)
    worker.kill(signal)
    return worker, result


needs_soft_shutdown = pytest.mark.skipif(CELERY < (5, 5), reason="Celery 5.5 has soft shutdown")
SOFT = {"worker_soft_shutdown_timeout": SOFT_TIMEOUT}


@pytest.mark.parametrize(
    ("signal", "environment", "settings"),
    [
        pytest.param("SIGQUIT", {}, {}, id="SIGQUIT"),
        pytest.param(
            "SIGTERM",
            {"REMAP_SIGTERM": "SIGQUIT"},
            {},
            id="REMAP_SIGTERM",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "SIGQUIT", {}, SOFT, id="soft", marks=[pytest.mark.exhaustive, needs_soft_shutdown]
        ),
        *(
            pytest.param("SIGQUIT", {"pool": pool}, {}, id=pool, marks=pytest.mark.exhaustive)
            for pool in ("gevent", "eventlet")
        ),
    ],
)
def test_interrupted_task_runs_again(
    open_shop: Callable[..., Shop],
    order: str,
    signal: str,
    environment: dict[str, str],
    settings: dict[str, Any],
) -> None:
    with open_shop(**settings) as shop:
        worker, result = run_then_stop(shop, order, signal, **environment)
        worker.wait_for_exit()
        stopped_at = time.time()

        shop.ledger.release(order)
        shop.start_worker("--queues", order)
        duplicate = pack.apply_async((order,), queue=order)
        # A dying worker with greenlets may take the message again, and keep the lease of 60 s.
        receipt = eventually(lambda: result.successful() and result.result, "success", 60 + SOON)
        assert duplicate.get(timeout=SOON) == receipt
        first, *others, last = shop.ledger.runs(order)
        ends = {None, "SystemExit", "GreenletExit"}
        assert ({run.end for run in (first, *others)} <= ends, last.end) == (True, "returned")
        assert "pool" in environment or last.started_at - stopped_at < 30, "before it expires"
        assert pack.idempotency_record(order).state is State.COMPLETED


@needs_soft_shutdown
@pytest.mark.exhaustive
def test_task_that_ends_in_time_completes(open_shop: Callable[..., Shop], order: str) -> None:
    with open_shop(**SOFT) as shop:
        worker, result = run_then_stop(shop, order, "SIGQUIT")
        shop.ledger.release(order)
        receipt = result.get(timeout=SOON)
        worker.wait_for_exit()

        shop.start_worker("--queues", order)
        assert pack.apply_async((order,), queue=order).get(timeout=SOON) == receipt
        assert [run.end for run in shop.ledger.runs(order)] == ["returned"]
        eventually(lambda: shop.messages(order) == 0, "its message is acknowledged")
