"""Executions that neither return nor raise an ordinary error release their key."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_idempotent import State
from tests.conftest import exhaustive_except
from tests.servers.program import is_running
from tests.waiting import SOON, eventually
from tests.worker.harness import OpenShop, Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import hard_limited, hard_returning, leaving, pack, soft_limited, unacked


@pytest.mark.parametrize("way", ["Ignore", "Reject"])
def test_dropping_the_message_releases_the_key(ledger: Ledger, order: str, way: str) -> None:
    dropped = leaving.delay(order, way)
    ledger.wait_for_signal(dropped.id, "released")

    assert leaving.delay(order, way).get(timeout=SOON) == "back"
    assert [run.end for run in ledger.runs(order)] == [way, "returned"]


@pytest.mark.parametrize(
    "way", exhaustive_except(["requeue", "SystemExit", "KeyboardInterrupt"], "requeue")
)
def test_requeueing_or_exiting_releases_the_key(ledger: Ledger, order: str, way: str) -> None:
    result = leaving.delay(order, way)

    assert result.get(timeout=SOON) == "back"
    runs = ledger.runs(order)
    assert [run.task_id for run in runs] == [result.id] * 2
    assert [run.end for run in runs] == ["Reject" if way == "requeue" else way, "returned"]
    assert [run.attempt for run in runs] == [1, 1 if way == "requeue" else 2]


def test_soft_time_limit_releases_the_key(ledger: Ledger, order: str) -> None:
    """The limit is half a second; the lease is 60 seconds."""
    ledger.hold(order)
    with pytest.raises(SoftTimeLimitExceeded):
        soft_limited.delay(order).get(timeout=SOON)
    ledger.release(order)

    assert soft_limited.delay(order).get(timeout=SOON)["receipt"]
    assert len(ledger.runs(order)) == 2


def test_error_of_a_message_that_is_not_acknowledged_is_not_stored(shop: Shop, order: str) -> None:
    """``acks_on_failure_or_timeout=False``: the next delivery of the message may run."""
    unacked.delay(order).get(timeout=SOON, propagate=False)

    assert not shop.redis.exists(f"idem:{unacked.idempotency_key_of(order)}")


@pytest.mark.parametrize(
    ("sent", "seconds"),
    # A duplicate may have one conflict before it runs; the pool may need five seconds to detect a
    # dead process. The lease is 60 seconds.
    [("SIGTERM", 2 + 2), ("SIGKILL", 15)],
)
def test_revoking_and_terminating_releases_the_key_before_the_lease_ends(
    ledger: Ledger, order: str, sent: str, seconds: int
) -> None:
    revoked = ledger.start(pack, order)
    revoked.revoke(terminate=True, signal=sent)
    eventually(lambda: revoked.state == "REVOKED", "the task is revoked")
    revoked_at = time.time()
    ledger.release(order)

    assert pack.delay(order).get(timeout=SOON)["receipt"]
    assert ledger.runs(order)[1].started_at - revoked_at < seconds


LOST = "has lost its lease"


def assert_no_alarm(shop: Shop, task_id: str) -> None:
    names = [signal.name for signal in shop.ledger.signals(task_id)]
    assert "lease_lost" not in names
    log = "".join(worker.logs() for worker in shop.workers)
    assert not re.search(rf"{task_id}.*{LOST}", log)


def wait_for_death(pid: int) -> None:
    eventually(lambda: not is_running(pid), "the process has ended")


@pytest.mark.exhaustive
class TestFalseAlarms:
    """``lease_lost`` is sent only if another execution may have begun."""

    @pytest.fixture(scope="class")
    @staticmethod
    def shared_shop(open_shop: OpenShop) -> Iterator[Shop]:
        # The heartbeat extends each lease several times before a process dies.
        with open_shop(idempotency_lease=2.0) as shop:
            shop.start_worker("--max-tasks-per-child", "1", concurrency=2)
            yield shop

    @pytest.mark.parametrize(
        "task", exhaustive_except([hard_limited, hard_returning], hard_limited)
    )
    def test_hard_time_limit(self, shop: Shop, ledger: Ledger, order: str, task: Any) -> None:
        """The message of the second task returns."""
        result = ledger.start(task, order)
        wait_for_death(ledger.wait_for_run(order).pid)

        assert_no_alarm(shop, result.id)
        shop.workers[0].wait_for_log(f"{result.id} is ended (hard_time_limit); its key is free")
        if task is hard_limited:
            task.delay(order)
        else:
            record = task.idempotency_record(order)
            assert record.ended_by == "hard_time_limit" or record.attempt > 1
        ledger.release(order)
        eventually(lambda: len(ledger.runs(order)) > 1, "it runs again")

    @pytest.mark.parametrize("signal", ["SIGTERM", "SIGKILL", "SIGQUIT"])
    def test_revoked_and_terminated(self, shop: Shop, order: str, signal: str) -> None:
        result = shop.ledger.start(pack, order)
        child = shop.ledger.wait_for_run(order).pid
        result.revoke(terminate=True, signal=signal)
        wait_for_death(child)
        shop.ledger.release(order)

        assert pack.delay(order).get(timeout=SOON)["receipt"]
        assert_no_alarm(shop, result.id)

    @pytest.mark.parametrize("signal", ["SIGTERM", "SIGQUIT"])
    def test_shutdown(self, shop: Shop, ledger: Ledger, order: str, signal: str) -> None:
        worker = shop.start_worker("--queues", order, concurrency=1)
        result = ledger.start(pack, order, queue=order)
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


@pytest.mark.parametrize("pool", exhaustive_except(["prefork", "gevent", "eventlet"], "prefork"))
def test_interrupted_task_runs_again(open_shop: OpenShop, order: str, pool: str) -> None:
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
