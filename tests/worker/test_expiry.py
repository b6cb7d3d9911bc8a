"""Executions and reservations of messages that expire or are revoked."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Any

import celery
import pytest
from celery.result import AsyncResult

from celery_idempotent import State
from celery_idempotent.core.store import run_sync
from tests.conftest import exhaustive_except
from tests.waiting import SOON, eventually
from tests.worker.harness import COPIED_MESSAGES, KILLED_WORKERS, OpenShop, Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import collapsed, in_turn, pack, try_in_a_burst, try_in_turn, try_later

#: Seconds: long enough for a message to start, shorter than the time until its redelivery.
EXPIRES = 2.0


SHOP = {**COPIED_MESSAGES, "idempotency_lease": 2.0}
#: Two, so that one discards the copy of a message that the other one runs.
WORKERS = [[], []]


def publish(shop: Shop, task: Any, *args: Any, **options: Any) -> tuple[AsyncResult, bytes]:
    """Publishes a message; returns also its bytes, which a redelivery repeats."""
    result = task.apply_async(args, queue="kept", **options)
    return result, shop.deliver_kept(result.id)


def assert_ran_once(shop: Shop, result: AsyncResult, order: str) -> None:
    """Asserts that the call, which waits for its release, has one execution and its result."""
    shop.ledger.release(order)
    receipt = result.get(timeout=SOON)
    assert receipt["receipt"]
    shop.wait_until_empty()
    again = shop.app.AsyncResult(result.id)
    assert (again.state, again.get(timeout=SOON)) == ("SUCCESS", receipt)
    assert [run.end for run in shop.ledger.runs(order)] == ["returned"]


def wait_for_expiry(seconds: float) -> None:
    """Waits until what was published before this call has expired."""
    expiry = time.time() + seconds
    eventually(lambda: time.time() > expiry, "it has expired")


# The copy has another expiry than the retry.
@pytest.mark.core
@pytest.mark.parametrize(
    "task", exhaustive_except([try_later, try_in_turn, try_in_a_burst], try_later)
)
def test_copy_that_expires_leaves_the_retry_alone(shop: Shop, order: str, task: Any) -> None:
    options = {"expires": EXPIRES, "task_id": f"the id of {order}"}  # replies have spaces, too
    result, message = publish(shop, task, order, 6.0, 60.0, **options)
    shop.ledger.wait_for_signal(result.id, "released")
    wait_for_expiry(EXPIRES)

    shop.redis.lpush("celery", message)

    shop.ledger.wait_for_signal(result.id, "conflicted")
    assert result.state == "RETRY"
    assert result.get(timeout=SOON)
    shop.wait_until_empty()
    assert shop.app.AsyncResult(result.id).state == "SUCCESS"
    assert [run.end for run in shop.ledger.runs(order)] == ["Retry", "returned"]


@pytest.mark.core
@pytest.mark.exhaustive
def test_copy_that_is_revoked_ends_the_retry(shop: Shop, ledger: Ledger, order: str) -> None:
    """The operator has revoked both: they have one task id."""
    result, message = publish(shop, try_later, order, 2.0)
    ledger.wait_for_signal(result.id, "released")
    shop.control("revoke", result.id)

    shop.redis.lpush("celery", message)

    eventually(lambda: result.state == "REVOKED", "it is revoked")
    shop.wait_until_empty()
    assert try_later.idempotency_record(order, 2.0) is None
    assert [run.end for run in ledger.runs(order)] == ["Retry"]


@pytest.mark.exhaustive
@pytest.mark.core
@pytest.mark.parametrize("task", [pack, in_turn, collapsed])
def test_copy_that_expires_later_leaves_the_result_alone(shop: Shop, order: str, task: Any) -> None:
    result, message = publish(shop, task, order, expires=EXPIRES)
    receipt = result.get(timeout=SOON)
    wait_for_expiry(EXPIRES)

    shop.replay(message, result.id)
    assert shop.app.AsyncResult(result.id).get(timeout=SOON) == receipt


@pytest.mark.core
@pytest.mark.parametrize("others", exhaustive_except([[], ["another"]], []))
def test_revoked_stamp_does_not_change_the_state_of_a_running_message(
    shop: Shop, ledger: Ledger, order: str, others: list[str]
) -> None:
    ledger.hold(order)
    stamp = [*others, order] if others else order
    result, message = publish(shop, pack, order, stamped_headers=["stamp"], stamp=stamp)
    ledger.wait_for_run(order)
    shop.control("revoke_by_stamped_headers", {"stamp": [order]})

    shop.redis.lpush("celery", message)

    ledger.wait_for_signal(result.id, "conflicted")
    assert result.state == "PENDING"
    assert_ran_once(shop, result, order)


# The broker redelivers the message after 3 s, when it has expired.
@pytest.mark.slow
@pytest.mark.exhaustive
def test_expired_copy_leaves_the_running_one_alone(shop: Shop, ledger: Ledger, order: str) -> None:
    result = ledger.start(pack, order, expires=EXPIRES)
    run = ledger.wait_for_run(order)
    ledger.wait_for_signal(result.id, "conflicted", number=2)
    eventually(lambda: time.time() > run.started_at + 8, "8 s are over")

    assert result.state == "PENDING"
    assert_ran_once(shop, result, order)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_expired_copy_runs_if_the_first_execution_dies(open_shop: OpenShop, order: str) -> None:
    with open_shop(
        **{**KILLED_WORKERS, **COPIED_MESSAGES},
        idempotency_lease=2.0,
        # Applies to duplicates; a copy of the running message is not a duplicate.
        idempotency_on_conflict="ignore",
    ) as shop:
        for _ in range(2):
            shop.start_worker(concurrency=1)
        result = shop.ledger.start(pack, order, expires=EXPIRES)
        run = shop.ledger.wait_for_run(order)
        shop.ledger.wait_for_signal(result.id, "conflicted")
        (owner,) = (worker for worker in shop.workers if run.pid in worker.children())
        owner.kill()
        shop.ledger.release(order)

        assert result.get(timeout=SOON)["receipt"]
        assert [run.end for run in shop.ledger.runs(order)] == [None, "returned"]
        shop.wait_until_empty()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif((5, 6) <= celery.VERSION < (5, 7), reason="5.6 stores REVOKED over any state")
def test_revoked_copy_leaves_the_running_one_alone(shop: Shop, ledger: Ledger, order: str) -> None:
    result = ledger.start(pack, order)
    pack.update_state(result.id, state="STARTED")
    shop.control("revoke", result.id)
    ledger.wait_for_signal(result.id, "conflicted", number=2)

    assert result.state == "STARTED"
    assert_ran_once(shop, result, order)


def test_waiting_message_keeps_its_reservation_until_it_expires(ledger: Ledger, order: str) -> None:
    """It renews its reservation when it meets the run, but not beyond its expiry."""
    ledger.start(collapsed, order)
    result = ledger.duplicate(collapsed, order, expires=60)

    store = collapsed.idempotency_configuration.executor.store
    waiting = run_sync(store.slot(collapsed.idempotency_key_of(order)))

    assert waiting.task_id == result.id
    assert waiting.expires_at.timestamp() <= time.time() + 61
    ledger.release(order)
    assert result.get(timeout=SOON)["receipt"]


def test_retry_reserves_the_key_until_it_expires(ledger: Ledger, order: str) -> None:
    result = try_later.apply_async((order, 600), expires=60)
    ledger.wait_for_signal(result.id, "released")
    record = try_later.idempotency_record(order, 600)

    assert (record.state, record.task_id) == (State.RESERVED, result.id)
    assert record.deadline <= datetime.now(timezone.utc) + timedelta(seconds=60)
    result.revoke()


def test_expired_retry_releases_the_key(ledger: Ledger, order: str) -> None:
    result = try_later.apply_async((order, 1.5), expires=1.0)

    eventually(lambda: result.state == "REVOKED", "it has expired")
    eventually(lambda: try_later.idempotency_record(order, 1.5) is None, "the key is free")
    assert [run.end for run in ledger.runs(order)] == ["Retry"]
