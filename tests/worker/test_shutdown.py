"""A worker is shut down, warm, soft or cold: each message is answered, by it or by the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import celery
import pytest

from celery_idempotent import State
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.shop import pack, waiting

pytestmark = pytest.mark.worker

CELERY = tuple(map(int, celery.__version__.split(".")[:2]))
#: Seconds. A task can be shorter than this, or longer.
SOFT_TIMEOUT = 2.0

needs_soft_shutdown = pytest.mark.skipif(CELERY < (5, 5), reason="Celery 5.5 has soft shutdown")


@pytest.fixture(scope="module")
def shared_shop(open_shop: Callable[..., Shop]) -> Iterator[Shop]:
    """Without a worker: each test has its own, and its own queue."""
    with open_shop() as shop:
        yield shop


def run_then_stop(
    shop: Shop, order: str, signal: str, task: Any = pack, **environment: str
) -> tuple[Any, Any]:
    """Start a worker on a queue named like the order, and stop it amid a run."""
    worker = shop.start_worker("--queues", order, **environment)
    shop.ledger.hold(order)
    result = task.apply_async((order,), queue=order)
    shop.ledger.wait_for_run(order)
    worker.kill(signal)
    return worker, result


COLD = [("SIGQUIT", {}), ("SIGTERM", {"REMAP_SIGTERM": "SIGQUIT"})]


class TestCold:
    @pytest.mark.parametrize(("signal", "environment"), COLD, ids=["SIGQUIT", "REMAP_SIGTERM"])
    def test_what_it_ran_is_run_once_more(
        self, shop: Shop, order: str, signal: str, environment: dict[str, str]
    ) -> None:
        worker, result = run_then_stop(shop, order, signal, **environment)
        worker.wait_for_exit()
        stopped_at = time.time()
        shop.ledger.release(order)
        shop.start_worker("--queues", order)
        duplicate = pack.apply_async((order,), queue=order)

        receipt = eventually(lambda: result.successful() and result.result, "the task succeeds")
        assert duplicate.get(timeout=SOON) == receipt
        killed, again = shop.ledger.runs(order)
        assert (killed.end in (None, "SystemExit"), again.end) == (True, "returned")
        assert again.started_at - stopped_at < 30, "the lease of 60 s has ended early"
        assert pack.idempotency_record(order).state is State.COMPLETED


@needs_soft_shutdown
class TestSoft:
    @pytest.fixture(scope="class")
    @classmethod
    def shared_shop(cls, open_shop: Callable[..., Shop]) -> Iterator[Shop]:
        with open_shop(worker_soft_shutdown_timeout=SOFT_TIMEOUT) as shop:
            yield shop

    @pytest.mark.slow
    def test_a_task_that_ends_in_time_completes(self, shop: Shop, order: str) -> None:
        worker, result = run_then_stop(shop, order, "SIGQUIT")
        shop.ledger.release(order)
        receipt = result.get(timeout=SOON)
        worker.wait_for_exit()
        shop.start_worker("--queues", order)

        assert pack.apply_async((order,), queue=order).get(timeout=SOON) == receipt
        assert [run.end for run in shop.ledger.runs(order)] == ["returned"]
        eventually(lambda: shop.messages(order) == 0, "its message is acknowledged")

    @pytest.mark.slow
    def test_a_longer_one_is_run_once_more(self, shop: Shop, order: str) -> None:
        worker, result = run_then_stop(shop, order, "SIGQUIT")
        worker.wait_for_exit()
        shop.ledger.release(order)
        shop.start_worker("--queues", order)

        receipt = eventually(lambda: result.successful() and result.result, "the task succeeds")
        assert pack.apply_async((order,), queue=order).get(timeout=SOON) == receipt
        killed, again = shop.ledger.runs(order)
        assert (killed.end in (None, "SystemExit"), again.end) == (True, "returned")


class TestWarm:
    def test_a_duplicate_that_waits_is_answered(self, shop: Shop, order: str) -> None:
        worker = shop.start_worker("--queues", order)
        shop.ledger.hold(order)
        first = waiting.apply_async((order,), queue=order)
        shop.ledger.wait_for_run(order)
        duplicate = waiting.apply_async((order,), queue=order)
        worker.wait_for_log(f"[{duplicate.id}] received")
        worker.kill("SIGTERM")
        worker.wait_for_log("Warm shutdown")
        shop.ledger.release(order)
        worker.wait_for_exit()
        shop.start_worker("--queues", order)

        assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
        assert len(shop.ledger.runs(order)) == 1

    @pytest.mark.slow
    def test_a_duplicate_that_is_to_come_back_does_so_elsewhere(
        self, shop: Shop, order: str
    ) -> None:
        worker = shop.start_worker("--queues", order)
        shop.ledger.hold(order)
        first = pack.apply_async((order,), queue=order)
        shop.ledger.wait_for_run(order)
        duplicate = pack.apply_async((order,), queue=order)
        # Put back, and held in the worker until its countdown is over.
        shop.ledger.wait_for_signal(duplicate.id, "conflicted", number=3)
        worker.kill("SIGTERM")
        worker.wait_for_log("Warm shutdown")
        shop.ledger.release(order)
        worker.wait_for_exit()
        shop.start_worker("--queues", order)

        assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
        assert len(shop.ledger.runs(order)) == 1
