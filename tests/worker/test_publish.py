"""``idempotency_dedupe_publish``: one message per key."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import celery
import pytest
from celery import chain
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult, ResultSet, denied_join_result, result_from_tuple
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_idempotent import ConflictError, KeyReusedError, State, outcome_of
from celery_idempotent.core.task.publish.result import RecordResult
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.canvas_tasks import report, ship
from tests.worker.harness import OpenShop, Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import OutOfStockError, charge, final, flaky, pack, try_later

needs_states_of_the_revoked = pytest.mark.skipif(
    celery.VERSION < (5, 6), reason="workers store REVOKED at once since Celery 5.6"
)

#: No worker consumes this queue.
UNCONSUMED_QUEUE = "unconsumed"


def unreachable_broker() -> Connection:
    """Returns a connection to a broker that does not exist."""
    return Connection("redis://127.0.0.1:1/0", transport_options={"max_retries": 1})


SHOP = {"idempotency_dedupe_publish": True}


def publish_three_times(shop: Shop, task: Any, *args: Any) -> str:
    """Asserts that three calls are one message; returns its task id."""
    before = shop.redis.llen(UNCONSUMED_QUEUE)
    results = [task.apply_async(args, queue=UNCONSUMED_QUEUE) for _ in range(3)]
    assert {result.id for result in results} == {results[0].id}
    assert shop.redis.llen(UNCONSUMED_QUEUE) == before + 1
    return str(results[0].id)


def test_queued_call_is_published_once(shop: Shop, order: str) -> None:
    task_id = publish_three_times(shop, pack, order)

    assert pack.idempotency_forget(order)
    assert pack.apply_async((order,), queue=UNCONSUMED_QUEUE).id != task_id


def test_call_after_an_error_with_completed_steps_is_published_once(shop: Shop, order: str) -> None:
    """The record with the steps is not reserved until the next publish."""
    with pytest.raises(OutOfStockError):
        ship.delay(order, "charge", "error").get(timeout=SOON)

    publish_three_times(shop, ship, order, "charge", "error")


def test_retrying_call_is_published_once(ledger: Ledger, order: str) -> None:
    first = try_later.delay(order, 1.0)
    eventually(lambda: first.state == "RETRY", "the task has retried")
    duplicate = try_later.delay(order, 1.0)

    assert duplicate.id == first.id
    assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
    assert [run.end for run in ledger.runs(order)] == ["Retry", "returned"]


def test_reservation_includes_the_countdown(shop: Shop, order: str) -> None:
    first = pack.apply_async((order,), countdown=600, queue=UNCONSUMED_QUEUE)
    record = pack.idempotency_record(order)

    assert (record.state, record.task_id) == (State.RESERVED, first.id)
    assert pack.delay(order).id == first.id


class TestRaising:
    @pytest.fixture(autouse=True)
    def _raise(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pack.__class__, "_configurations", {})
        monkeypatch.setattr(pack.__class__, "idempotency_dedupe_publish", "raise")

    @pytest.mark.parametrize("state", ["queued", "running", "finished"])
    def test_a_duplicate_is_not_published_and_raises(
        self, shop: Shop, ledger: Ledger, order: str, state: str
    ) -> None:
        if state == "queued":
            first = pack.apply_async((order,), queue=f"late {order}")
        else:
            first = ledger.start(pack, order)
        if state == "finished":
            ledger.release(order)
            first.get(timeout=SOON)
        with pytest.raises(ConflictError, match=f"not published: task {first.id} has") as caught:
            pack.delay(order)
        shop.control("add_consumer", f"late {order}")
        ledger.release(order)

        assert caught.value.task_id == first.id
        assert first.get(timeout=SOON)["receipt"]
        assert len(ledger.runs(order)) == 1

    def test_a_duplicate_in_a_canvas_is_published(self, ledger: Ledger, order: str) -> None:
        pack.delay(order).get(timeout=SOON)

        assert chain(pack.s(order), report.s(order)).delay().get(timeout=SOON)


@pytest.mark.parametrize("forgotten", [False, True], ids=["kept", "forgotten"])
@pytest.mark.parametrize("task", [pack, final])
def test_duplicate_has_the_outcome(ledger: Ledger, order: str, task: Any, forgotten: bool) -> None:
    """If the result backend has forgotten it, the record has it."""
    first = task.delay(order)
    outcome = first.get(timeout=SOON, propagate=False)
    if forgotten:
        first.forget()
    duplicate = task.delay(order)

    assert duplicate.id == first.id
    if task is pack:
        assert duplicate.get(timeout=SOON) == outcome
    else:
        with pytest.raises(OutOfStockError) as caught:
            duplicate.get(timeout=SOON)
        assert caught.value.args == (order, 3)
        assert duplicate.state == "FAILURE"
    assert len(ledger.runs(order)) == 1


def test_call_after_a_released_error_is_published(ledger: Ledger, order: str) -> None:
    first = flaky.delay(order, times=1)
    first.get(timeout=SOON, propagate=False)
    second = flaky.delay(order, times=1)

    assert second.id != first.id
    assert second.get(timeout=SOON) == "found one"


def test_other_arguments_are_rejected(ledger: Ledger, order: str) -> None:
    first = ledger.start(charge, order, 1)

    with pytest.raises(KeyReusedError, match=first.id):
        charge.delay(order, amount=2)
    ledger.release(order)
    assert first.get(timeout=SOON)["amount"] == 1


@pytest.mark.exhaustive
def test_failed_publish_releases_the_key(shop: Shop, ledger: Ledger, order: str) -> None:
    with unreachable_broker() as connection, pytest.raises(OperationalError):
        pack.apply_async((order,), connection=connection, retry=False)

    assert pack.idempotency_record(order) is None
    assert pack.delay(order).get(timeout=SOON)["receipt"]


def test_failed_publish_does_not_affect_a_running_call(ledger: Ledger, order: str) -> None:
    first = ledger.start(pack, order)
    run = ledger.wait_for_run(order)
    with unreachable_broker() as connection:
        duplicate = pack.apply_async((order,), connection=connection, retry=False)

    assert duplicate.id == first.id, "nothing was published"
    assert pack.idempotency_record(order).token == run.token


# An expired or revoked message never runs, so the next call must be published.
@pytest.mark.parametrize("of_the_task", [False, True])
def test_expired_message_releases_the_key(
    shop: Shop, order: str, of_the_task: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expires = datetime.now(timezone.utc) + timedelta(seconds=0.5)
    with monkeypatch.context() as patch:
        if of_the_task:
            task = shop.app.tasks["shop.pack"]
            patch.setattr(task, "expires", 0.5)
            patch.setattr(task, "_exec_options", None)  # Celery caches it there
        options = {} if of_the_task else {"expires": expires}
        expired = pack.apply_async((order,), queue=UNCONSUMED_QUEUE, **options)
    meanwhile = pack.delay(order)
    eventually(lambda: pack.idempotency_record(order) is None, "it has expired", seconds=5)
    next_call = pack.delay(order)

    assert meanwhile.id == expired.id
    assert next_call.id != expired.id
    assert next_call.get(timeout=SOON)["receipt"]


def test_message_published_after_its_expiry_reserves_no_key(shop: Shop, order: str) -> None:
    pack.apply_async((order,), expires=-1)

    assert pack.idempotency_record(order) is None
    assert pack.delay(order).get(timeout=SOON)["receipt"]


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("in its queue", marks=needs_states_of_the_revoked),
        pytest.param("in a worker", marks=needs_states_of_the_revoked),
        pytest.param("on its way", marks=pytest.mark.exhaustive),
    ],
)
def test_revoked_message_releases_the_key(shop: Shop, order: str, place: str) -> None:
    countdown = 600 if place == "in a worker" else None
    queue = "celery" if countdown else f"late {order}"
    revoked = pack.apply_async((order,), countdown=countdown, queue=queue)
    shop.control("revoke", revoked.id)
    if place == "on its way":
        shop.control("add_consumer", queue)
        eventually(lambda: pack.idempotency_record(order) is None, "it is discarded")
    next_call = pack.delay(order)

    assert next_call.id != revoked.id
    assert next_call.get(timeout=SOON)["receipt"]
    assert len(shop.ledger.runs(order)) == 1


def test_call_with_a_link_is_published(ledger: Ledger, order: str) -> None:
    first = ledger.start(pack, order)
    duplicate = pack.apply_async((order,), link=report.s(order))
    ledger.release(order)

    assert duplicate.id != first.id
    assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
    eventually(lambda: len(ledger.notes(order)) == 1, "the link is followed")
    assert len(ledger.runs(order)) == 1


@pytest.mark.parametrize("ended", [False, True], ids=["while it runs", "after it"])
@pytest.mark.parametrize("way", ["apply_async", "set", "freeze"])
def test_one_with_an_own_id_is_published(ledger: Ledger, order: str, way: str, ended: bool) -> None:
    first = ledger.start(pack, order)
    if ended:
        ledger.release(order)
        first.get(timeout=SOON)
    own, signature = f"own {order}", pack.s(order)
    if way == "freeze":
        signature.freeze(own)  # others may wait for its result
    options = {"task_id": own} if way == "apply_async" else {}
    published = (signature.set(task_id=own) if way == "set" else signature).apply_async(**options)
    ledger.release(order)

    assert published.id == own
    assert pack.AsyncResult(own).get(timeout=SOON) == first.get(timeout=SOON)
    assert len(ledger.runs(order)) == 1


def test_one_with_an_own_id_is_reserved(shop: Shop, order: str) -> None:
    own = pack.apply_async((order,), task_id=f"own {order}", queue=UNCONSUMED_QUEUE)

    assert pack.delay(order).id == own.id


def test_head_of_a_chain_is_published(ledger: Ledger, order: str) -> None:
    receipt = pack.delay(order).get(timeout=SOON)

    assert chain(pack.s(order), report.s(order)).delay().get(timeout=SOON) == receipt
    assert len(ledger.runs(order)) == 1


# The key is held by a call that stores no result with its task id.
@pytest.mark.parametrize(
    ("task", "done"), [(pack, False), (pack, True), (final, False)], ids=["runs", "done", "fails"]
)
def test_key_held_by_an_eager_call(ledger: Ledger, order: str, task: Any, done: bool) -> None:
    ledger.hold(order)
    with ThreadPoolExecutor(1) as thread:
        eager = thread.submit(task.apply, (order,))
        ledger.wait_for_run(order)
        if done:
            ledger.release(order)
            eager.result(SOON)
        result = task.delay(order)
        assert result.ready() is done
        if not done:
            assert result.state == "PENDING"
            with pytest.raises(CeleryTimeoutError):
                result.get(timeout=0.2)
        ledger.release(order)

        if task is final:
            with pytest.raises(OutOfStockError):
                result.get(timeout=SOON)
        else:
            assert result.get(timeout=SOON) == eager.result(SOON).get()
    assert result.state == ("FAILURE" if task is final else "SUCCESS")
    assert (result.successful(), result.failed()) == (task is pack, task is final)
    assert len(ledger.runs(order)) == 1


@pytest.mark.parametrize("done", [False, True], ids=["runs", "is done"])
def test_key_held_by_a_call_with_ignore_result(ledger: Ledger, order: str, done: bool) -> None:
    first = ledger.start(pack, order, ignore_result=True)
    if done:
        ledger.release(order)
        ledger.wait_for_signal(first.id, "completed")
    result = pack.delay(order)
    assert (outcome_of(result) is None) is not done
    ledger.release(order)

    assert result.get(timeout=SOON)["receipt"]
    assert result.id == first.id
    outcome = outcome_of(result)
    assert (outcome.replayed, outcome.task_id) == (True, first.id)


class TestResultOfADeduplicatedPublish:
    """It can be used like any AsyncResult."""

    @pytest.fixture
    def result(self, shop: Shop, order: str) -> AsyncResult:
        pack.apply((order,))
        return pack.delay(order)

    def test_is_an_async_result_that_can_be_copied(self, shop: Shop, result: AsyncResult) -> None:
        assert isinstance(result, RecordResult)
        assert AsyncResult(result.id) == result
        assert result_from_tuple(result.as_tuple(), shop.app).id == result.id
        receipt = result.get(timeout=SOON)
        for copied in (copy.copy(result), pickle.loads(pickle.dumps(result))):
            assert copied.get(timeout=SOON) == receipt
        result.forget()
        assert result.get(timeout=SOON) == receipt

    def test_can_be_joined(self, result: AsyncResult, order: str) -> None:
        published = pack.delay(f"another {order}")

        receipts = ResultSet([result, published]).get(timeout=SOON)
        assert receipts == [result.get(), published.get()]
        assert ResultSet([published, result]).join(timeout=SOON) == receipts[::-1]

    def test_cannot_be_awaited_within_a_task(self, result: AsyncResult) -> None:
        with denied_join_result(), pytest.raises(RuntimeError, match="within a task"):
            result.get(timeout=SOON)

    def test_needs_no_backend(self, server: RedisServer, open_shop: OpenShop, order: str) -> None:
        settings = {"result_backend": "disabled://", "idempotency_dedupe_publish": True}
        with open_shop(**settings, idempotency_redis_url=server.url) as shop:
            pack.apply((order,))

            assert pack.delay(order).get(timeout=SOON)["receipt"]
            assert len(shop.ledger.runs(order)) == 1
