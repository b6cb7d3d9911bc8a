"""A task that retries is not completed, however its body ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery import chain

from celery_idempotent import State
from tests.exhaustive import exhaustive_except
from tests.waiting import SOON, eventually
from tests.worker.canvas_tasks import report
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.rescheduling import WAYS, reschedule, reschedule_by_itself, stop_here

pytestmark = pytest.mark.worker


@pytest.fixture(scope="module")
def shared_shop(open_shop: Callable[..., Shop]) -> Iterator[Shop]:
    # With "run", a stored result ends a reservation, but not that of a retry.
    settings = {"imports": ["tests.worker.rescheduling"], "idempotency_on_store_error": "run"}
    with open_shop(**settings) as shop:
        shop.start_worker(concurrency=4)
        yield shop


@pytest.mark.core
@pytest.mark.parametrize("way", exhaustive_except(WAYS, "suppressed", "twice", "then an error"))
def test_outcome_is_that_of_the_retry(ledger: Ledger, order: str, way: str) -> None:
    reschedule.delay(order, way)
    eventually(
        lambda: [run.end for run in ledger.runs(order)][1:] == ["returned"], "the retry has run"
    )

    assert reschedule.delay(order, way).get(timeout=SOON) == "done"
    assert len(ledger.runs(order)) == 2
    assert len({run.key for run in ledger.runs(order)}) == 1


@pytest.mark.parametrize(
    "way", exhaustive_except(["throw=False", "suppressed", "then an error"], "throw=False")
)
def test_key_is_reserved_for_the_retry(ledger: Ledger, order: str, way: str) -> None:
    first = reschedule.delay(order, way)
    released = ledger.wait_for_signal(first.id, "released")
    duplicate = reschedule.delay(order, way)

    assert released.details["reserved_seconds"] > 60
    assert duplicate.get(timeout=SOON) == "done"
    assert [run.task_id for run in ledger.runs(order)] == [first.id] * 2


def test_continuation_is_sent_as_in_plain_celery(shop: Shop, ledger: Ledger, order: str) -> None:
    """It is sent with the first value and again after the retry, as in plain Celery."""
    chain(reschedule.s(order, "throw=False"), report.s(order)).delay()

    eventually(lambda: len(ledger.notes(order)) == 2, "the continuation has run")
    shop.wait_until_empty()
    assert ledger.notes(order) == ['"scheduled"', '"done"']


def test_only_one_of_two_retries_runs(shop: Shop, ledger: Ledger, order: str) -> None:
    reschedule.delay(order, "twice")

    ledger.wait_for_run(order, 2)
    shop.wait_until_empty()
    assert len(ledger.runs(order)) == 2


def test_autoretry_for_reserves_the_key(ledger: Ledger, order: str) -> None:
    assert reschedule_by_itself.delay(order).get(timeout=SOON) == "done"
    assert [run.end for run in ledger.runs(order)] == ["OutOfStockError", "returned"]
    assert reschedule_by_itself.idempotency_record(order).state is State.COMPLETED


class TestDroppedContinuation:
    """``self.request.chain = None``"""

    @pytest.mark.parametrize("moment", [None, "before", "after"])
    def test_copy_of_the_message_does_not_send_it(
        self, shop: Shop, ledger: Ledger, order: str, moment: str | None
    ) -> None:
        if moment:
            ledger.kill_once(moment, order)
        canvas = chain(stop_here.s(order).set(task_id=order, queue="kept"), report.s(order))
        canvas.set(link_error=report.si("failed", order)).delay()
        message = eventually(lambda: shop.redis.lpop("kept"), "the message is published")
        shop.redis.lpush("celery", message)
        ledger.wait_for_signal(order, "completed")
        shop.redis.lpush("celery", message)

        ledger.wait_for_signal(order, "replayed")
        shop.wait_until_empty()
        assert ledger.notes(order) == []
        assert len(ledger.runs(order)) == 1

    def test_duplicate_sends_its_own_continuation(
        self, shop: Shop, ledger: Ledger, order: str
    ) -> None:
        stop_here.apply_async((order,), task_id=order, link=report.s(order)).get(timeout=SOON)
        end = chain(stop_here.s(order), report.s(order)).delay()

        assert end.get(timeout=SOON) == order
        assert len(ledger.notes(order)) == 1
        assert len(ledger.runs(order)) == 1
