"""``lease_lost`` is sent only if another execution may have begun, however an execution ends."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import pytest
from celery.exceptions import TimeLimitExceeded

from celery_idempotent import State
from tests.servers.processes import is_running
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import hard_limited, hard_limited_again, pack

pytestmark = pytest.mark.worker

LOST = "has lost its lease"


@pytest.fixture(scope="module")
def shared_shop(open_shop: Callable[..., Shop]) -> Iterator[Shop]:
    # The heartbeat extends each lease several times before a process dies.
    with open_shop(idempotency_lease=2.0) as shop:
        shop.start_worker("--max-tasks-per-child", "1", concurrency=2)
        yield shop


def assert_no_alarm(shop: Shop, task_id: str) -> None:
    names = [signal.name for signal in shop.ledger.signals(task_id)]
    assert "lease_lost" not in names
    log = "".join(worker.logs() for worker in shop.workers)
    assert not re.search(rf"{task_id}.*{LOST}", log)


def wait_for_death(pid: int) -> None:
    eventually(lambda: not is_running(pid), "the process has ended")


def test_hard_time_limit(shop: Shop, ledger: Ledger, order: str) -> None:
    ledger.hold(order)
    result = hard_limited.delay(order)
    child = ledger.wait_for_run(order).pid
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=SOON)
    wait_for_death(child)

    assert_no_alarm(shop, result.id)
    shop.workers[0].wait_for_log(f"task {result.id} is ended (hard_time_limit); its key is free")
    died_at = time.time()
    ledger.release(order)
    assert hard_limited.delay(order).get(timeout=SOON)["receipt"]
    assert ledger.runs(order)[1].started_at - died_at < 4, "it waits for no lease"


@pytest.mark.exhaustive
def test_hard_time_limit_of_a_message_that_returns(shop: Shop, ledger: Ledger, order: str) -> None:
    ledger.hold(order)
    result = hard_limited_again.delay(order)
    child = ledger.wait_for_run(order).pid
    wait_for_death(child)

    assert_no_alarm(shop, result.id)
    shop.workers[0].wait_for_log(f"task {result.id} is ended (hard_time_limit); its key is free")
    record = hard_limited_again.idempotency_record(order)
    assert record.ended_by == "hard_time_limit" or record.attempt > 1
    ledger.release(order)
    eventually(lambda: len(ledger.runs(order)) > 1, "it runs again")


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGKILL", "SIGQUIT"])
def test_revoked_and_terminated(shop: Shop, ledger: Ledger, order: str, signal: str) -> None:
    ledger.hold(order)
    result = pack.delay(order)
    child = ledger.wait_for_run(order).pid
    result.revoke(terminate=True, signal=signal)
    wait_for_death(child)
    ledger.release(order)

    assert pack.delay(order).get(timeout=SOON)["receipt"]
    assert_no_alarm(shop, result.id)


@pytest.mark.exhaustive
def test_process_that_is_replaced(shop: Shop, ledger: Ledger, order: str) -> None:
    results = [pack.delay(f"{order} {number}") for number in range(4)]

    for result in results:
        assert result.get(timeout=SOON)["receipt"]
    for number in range(4):
        wait_for_death(ledger.runs(f"{order} {number}")[0].pid)
    for result in results:
        assert_no_alarm(shop, result.id)


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGQUIT"])
@pytest.mark.exhaustive
def test_shutdown(shop: Shop, ledger: Ledger, order: str, signal: str) -> None:
    worker = shop.start_worker("--queues", order, concurrency=1)
    ledger.hold(order)
    result = pack.apply_async((order,), queue=order)
    child = ledger.wait_for_run(order).pid
    worker.kill(signal)
    if signal == "SIGTERM":
        worker.wait_for_log("Warm shutdown")
        ledger.release(order)
        assert result.get(timeout=SOON)["receipt"]
        assert pack.idempotency_record(order).state is State.COMPLETED
    worker.wait_for_exit()
    wait_for_death(child)

    assert_no_alarm(shop, result.id)
