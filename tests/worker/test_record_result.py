"""The result of a deduplicated publish, which can also be read from the record."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult, ResultSet, denied_join_result, result_from_tuple

from celery_idempotent import outcome_of
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON
from tests.worker.failing_tasks import OutOfStockError, final
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import forgetful, pack

pytestmark = pytest.mark.worker


@pytest.fixture(scope="module")
def shared_shop(open_shop: Callable[..., Shop]) -> Iterator[Shop]:
    with open_shop(idempotency_dedupe_publish=True) as shop:
        shop.start_worker(concurrency=4)
        yield shop


class TestKeyHeldBy:
    """The key is held by a call that stores no result with its task id."""

    @pytest.mark.parametrize("done", [False, True], ids=["runs", "is done"])
    def test_item_of_a_map(self, ledger: Ledger, order: str, done: bool) -> None:
        others = [f"{number} {order}" for number in range(2)]
        ledger.hold(order)
        message = pack.map([*others, order]).delay()
        ledger.wait_for_run(order)
        if done:
            ledger.release(order)
            message.get(timeout=SOON)
        result = pack.delay(order)
        ledger.release(order)

        assert result.get(timeout=SOON) == message.get(timeout=SOON)[-1]
        assert len(ledger.runs(order)) == 1

    @pytest.mark.parametrize("done", [False, True], ids=["runs", "is done"])
    def test_eager_call(self, ledger: Ledger, order: str, done: bool) -> None:
        ledger.hold(order)
        with ThreadPoolExecutor(1) as thread:
            eager = thread.submit(pack.apply, (order,))
            ledger.wait_for_run(order)
            if done:
                ledger.release(order)
                eager.result(SOON)
            result = pack.delay(order)
            assert result.ready() is done
            ledger.release(order)

            assert result.get(timeout=SOON) == eager.result(SOON).get()
        assert (result.state, result.successful()) == ("SUCCESS", True)
        assert len(ledger.runs(order)) == 1

    @pytest.mark.parametrize("done", [False, True], ids=["runs", "is done"])
    def test_call_with_ignore_result(self, ledger: Ledger, order: str, done: bool) -> None:
        ledger.hold(order)
        first = pack.apply_async((order,), ignore_result=True)
        ledger.wait_for_run(order)
        if done:
            ledger.release(order)
            ledger.wait_for_signal(first.id, "completed")
        result = pack.delay(order)
        assert (outcome_of(result) is None) is not done
        ledger.release(order)

        assert result.get(timeout=SOON)["receipt"]
        assert result.id == first.id
        outcome = outcome_of(result)
        assert outcome is not None
        assert (outcome.replayed, outcome.task_id) == (True, first.id)

    def test_task_with_store_result_off(self, ledger: Ledger, order: str) -> None:
        ledger.hold(order)
        first = forgetful.delay(order)
        ledger.wait_for_run(order)
        result = forgetful.delay(order)
        ledger.release(order)

        assert result.get(timeout=SOON) == first.get(timeout=SOON)

    def test_execution_that_fails(self, ledger: Ledger, order: str) -> None:
        ledger.hold(order)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(final.apply, (order,))
            ledger.wait_for_run(order)
            result = final.delay(order)
            ledger.release(order)

            with pytest.raises(OutOfStockError):
                result.get(timeout=SOON)
        assert (result.state, result.failed()) == ("FAILURE", True)

    def test_running_execution_times_out(self, ledger: Ledger, order: str) -> None:
        ledger.hold(order)
        pack.delay(order)
        ledger.wait_for_run(order)
        result = pack.delay(order)

        assert (result.state, result.ready()) == ("PENDING", False)
        with pytest.raises(CeleryTimeoutError):
            result.get(timeout=0.2)


class TestResultOfADeduplicatedPublish:
    """It can be used like any AsyncResult."""

    @pytest.fixture
    def result(self, shop: Shop, order: str) -> AsyncResult:
        pack.apply((order,))
        return pack.delay(order)

    def test_is_an_async_result(self, result: AsyncResult) -> None:
        assert isinstance(result, AsyncResult)
        assert AsyncResult(result.id) == result

    @pytest.mark.parametrize(
        "copy_of",
        [copy.copy, lambda result: pickle.loads(pickle.dumps(result))],
        ids=["copy", "pickle"],
    )
    def test_can_be_copied(self, result: AsyncResult, copy_of: Callable[..., Any]) -> None:
        assert copy_of(result).get(timeout=SOON) == result.get(timeout=SOON)

    def test_can_be_converted_to_a_tuple(self, shop: Shop, result: AsyncResult) -> None:
        assert result_from_tuple(result.as_tuple(), shop.app).id == result.id

    def test_can_be_joined(self, result: AsyncResult, order: str) -> None:
        published = pack.delay(f"another {order}")

        receipts = ResultSet([result, published]).get(timeout=SOON)
        assert receipts == [result.get(), published.get()]
        assert ResultSet([published, result]).join(timeout=SOON) == receipts[::-1]

    def test_cannot_be_awaited_within_a_task(self, result: AsyncResult) -> None:
        with denied_join_result(), pytest.raises(RuntimeError, match="within a task"):
            result.get(timeout=SOON)

    def test_remains_after_forget(self, result: AsyncResult) -> None:
        receipt = result.get(timeout=SOON)
        result.forget()

        assert result.get(timeout=SOON) == receipt

    def test_needs_no_result_backend(
        self, server: RedisServer, open_shop: Callable[..., Shop], order: str
    ) -> None:
        settings = {"result_backend": "disabled://", "idempotency_dedupe_publish": True}
        with open_shop(**settings, idempotency_redis_url=server.url) as shop:
            pack.apply((order,))

            assert pack.delay(order).get(timeout=SOON)["receipt"]
            assert len(shop.ledger.runs(order)) == 1
