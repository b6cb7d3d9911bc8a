"""``idempotency_dedupe_publish``: one message for a key that is in flight or done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import celery
import pytest
from celery import chain
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_idempotent import KeyReusedError, ResultNotStoredError, State
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.shop import (
    OutOfStockError,
    charge,
    final,
    flaky,
    forgetful,
    hand_over,
    pack,
    report,
    ship,
    short_lease,
    try_later,
)

pytestmark = pytest.mark.worker

needs_states_of_the_revoked = pytest.mark.skipif(
    celery.VERSION < (5, 6), reason="workers store REVOKED at once since Celery 5.6"
)

#: No worker takes from it.
NOBODYS_QUEUE = "nobody"


def nowhere() -> Connection:
    """A connection to a broker that is not there."""
    return Connection("redis://127.0.0.1:1/0", transport_options={"max_retries": 1})


@pytest.fixture(scope="module")
def shared_shop(open_shop: Callable[..., Shop]) -> Iterator[Shop]:
    with open_shop(idempotency_dedupe_publish=True) as shop:
        shop.start_worker(concurrency=4)
        yield shop


class TestInFlight:
    def test_a_message_that_waits_is_the_only_one(self, shop: Shop, order: str) -> None:
        before = shop.redis.llen(NOBODYS_QUEUE)
        results = [pack.apply_async((order,), queue=NOBODYS_QUEUE) for _ in range(3)]

        assert {result.id for result in results} == {results[0].id}
        assert shop.redis.llen(NOBODYS_QUEUE) == before + 1

    def test_one_that_runs_gives_its_result(self, ledger: Ledger, order: str) -> None:
        ledger.hold(order)
        first = pack.delay(order)
        ledger.wait_for_run(order)
        duplicate = pack.delay(order)
        ledger.release(order)

        assert duplicate.id == first.id
        assert duplicate.get(timeout=SOON)["receipt"]
        assert len(ledger.runs(order)) == 1

    def test_one_that_retries_gives_its_result(self, ledger: Ledger, order: str) -> None:
        first = try_later.delay(order, 1.0)
        eventually(lambda: first.state == "RETRY", "the task has retried")
        duplicate = try_later.delay(order, 1.0)

        assert duplicate.id == first.id
        assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
        assert [run.end for run in ledger.runs(order)] == ["Retry", "returned"]

    def test_a_countdown_is_part_of_the_reservation(self, shop: Shop, order: str) -> None:
        first = pack.apply_async((order,), countdown=600, queue=NOBODYS_QUEUE)
        record = pack.idempotency_record(order)

        assert (record.state, record.task_id) == (State.RESERVED, first.id)
        assert pack.delay(order).id == first.id

    def test_the_reservation_is_no_conflict_for_its_own_message(
        self, ledger: Ledger, order: str
    ) -> None:
        result = pack.delay(order)

        assert result.get(timeout=SOON)["receipt"]
        assert ledger.signals(result.id, "conflicted") == []


class TestDone:
    def test_gives_the_first_result(self, ledger: Ledger, order: str) -> None:
        first = pack.delay(order)
        receipt = first.get(timeout=SOON)
        duplicate = pack.delay(order)

        assert (duplicate.id, duplicate.get(timeout=SOON)) == (first.id, receipt)
        assert ledger.signals(first.id, "replayed") == [], "there was no second message"

    def test_answers_from_the_record_where_the_backend_has_forgotten(
        self, ledger: Ledger, order: str
    ) -> None:
        first = pack.delay(order)
        receipt = first.get(timeout=SOON)
        first.forget()
        duplicate = pack.delay(order)

        assert (duplicate.id, duplicate.get(timeout=SOON)) == (first.id, receipt)
        assert len(ledger.runs(order)) == 1

    @pytest.mark.parametrize("forgotten", [False, True], ids=["kept", "forgotten"])
    def test_raises_the_error_that_ended_it(
        self, ledger: Ledger, order: str, forgotten: bool
    ) -> None:
        first = final.delay(order)
        first.get(timeout=SOON, propagate=False)
        if forgotten:
            first.forget()
        duplicate = final.delay(order)

        with pytest.raises(OutOfStockError) as caught:
            duplicate.get(timeout=SOON)
        assert caught.value.args == (order, 3)
        assert (duplicate.id, duplicate.state) == (first.id, "FAILURE")
        assert len(ledger.runs(order)) == 1

    def test_says_so_where_no_value_is_kept(self, ledger: Ledger, order: str) -> None:
        first = forgetful.delay(order)
        first.get(timeout=SOON)
        first.forget()

        with pytest.raises(ResultNotStoredError):
            forgetful.delay(order).get(timeout=SOON)
        assert len(ledger.runs(order)) == 1

    def test_an_error_that_gave_the_key_back_is_published_again(
        self, ledger: Ledger, order: str
    ) -> None:
        first = flaky.delay(order, times=1)
        first.get(timeout=SOON, propagate=False)
        second = flaky.delay(order, times=1)

        assert second.id != first.id
        assert second.get(timeout=SOON) == "found one"


class TestOtherArguments:
    def test_are_refused_by_the_publish(self, ledger: Ledger, order: str) -> None:
        ledger.hold(order)
        first = charge.delay(order, amount=1)

        with pytest.raises(KeyReusedError, match=first.id):
            charge.delay(order, amount=2)
        ledger.release(order)
        assert first.get(timeout=SOON)["amount"] == 1


class TestMessagesThatAreLost:
    def test_a_publish_that_fails_gives_the_key_back(
        self, shop: Shop, ledger: Ledger, order: str
    ) -> None:
        with nowhere() as connection, pytest.raises(OperationalError):
            pack.apply_async((order,), connection=connection, retry=False)

        assert pack.idempotency_record(order) is None
        assert pack.delay(order).get(timeout=SOON)["receipt"]

    def test_a_publish_that_fails_leaves_the_one_in_flight_alone(
        self, shop: Shop, ledger: Ledger, order: str
    ) -> None:
        ledger.hold(order)
        first = pack.delay(order)
        run = ledger.wait_for_run(order)
        with nowhere() as connection:
            duplicate = pack.apply_async((order,), connection=connection, retry=False)

        assert duplicate.id == first.id, "nothing had to be published"
        assert pack.idempotency_record(order).token == run.token

    def test_the_reservation_of_one_that_is_lost_ends(
        self, shop: Shop, ledger: Ledger, order: str
    ) -> None:
        lost = short_lease.apply_async((order,), queue="lost")
        shop.redis.delete("lost")
        assert short_lease.delay(order).id == lost.id

        eventually(lambda: short_lease.idempotency_record(order) is None, "the reservation ends")
        assert short_lease.delay(order).get(timeout=SOON)["receipt"]


def in_half_a_second() -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=0.5)


class TestMessagesThatAreDiscarded:
    """What expires or is revoked never runs: the next call must."""

    @pytest.mark.parametrize(
        "expires",
        [lambda: 0.5, in_half_a_second, lambda: in_half_a_second().isoformat()],
        ids=["seconds", "datetime", "text"],
    )
    def test_an_expired_one_keeps_no_key(
        self, shop: Shop, ledger: Ledger, order: str, expires: Callable[[], Any]
    ) -> None:
        expired = pack.apply_async((order,), expires=expires(), queue=NOBODYS_QUEUE)
        meanwhile = pack.delay(order)
        eventually(lambda: pack.idempotency_record(order) is None, "it has expired", seconds=5)
        again = pack.delay(order)

        assert meanwhile.id == expired.id
        assert again.id != expired.id
        assert again.get(timeout=SOON)["receipt"]

    def test_a_task_may_say_when_they_expire(
        self, monkeypatch: pytest.MonkeyPatch, shop: Shop, order: str
    ) -> None:
        monkeypatch.setattr(shop.app.tasks["shop.pack"], "expires", 0.5)
        pack.apply_async((order,), queue=NOBODYS_QUEUE)

        eventually(lambda: pack.idempotency_record(order) is None, "it has expired", seconds=5)

    def test_one_that_has_expired_when_it_is_published_keeps_no_key(
        self, shop: Shop, ledger: Ledger, order: str
    ) -> None:
        pack.apply_async((order,), expires=-1)

        assert pack.idempotency_record(order) is None
        assert pack.delay(order).get(timeout=SOON)["receipt"]

    @pytest.mark.parametrize("countdown", [None, 600], ids=["in its queue", "in a worker"])
    @needs_states_of_the_revoked
    def test_a_revoked_one_that_waits_keeps_no_key(
        self, shop: Shop, ledger: Ledger, order: str, countdown: int | None
    ) -> None:
        queue = "celery" if countdown else NOBODYS_QUEUE
        revoked = pack.apply_async((order,), countdown=countdown, queue=queue)
        revoked.revoke(wait=True, timeout=1)
        again = pack.delay(order)

        assert again.id != revoked.id
        assert again.get(timeout=SOON)["receipt"]
        assert len(ledger.runs(order)) == 1

    @needs_states_of_the_revoked
    def test_a_revoked_one_keeps_no_key_from_other_arguments(
        self, shop: Shop, ledger: Ledger, order: str
    ) -> None:
        charge.apply_async((order, 1), queue=NOBODYS_QUEUE).revoke(wait=True, timeout=1)

        assert charge.delay(order, 2).get(timeout=SOON)["amount"] == 2

    def test_a_worker_that_discards_a_revoked_one_gives_the_key_back(
        self, shop: Shop, ledger: Ledger, order: str
    ) -> None:
        revoked = pack.apply_async((order,), queue=f"late {order}")
        revoked.revoke(wait=True, timeout=1)
        shop.app.control.add_consumer(f"late {order}", reply=True)
        eventually(lambda: pack.idempotency_record(order) is None, "the key is free")

        again = pack.delay(order)
        assert again.id != revoked.id
        assert again.get(timeout=SOON)["receipt"]


class TestManyThroughOneConnection:
    def test_are_published_once_for_each_key(self, shop: Shop, ledger: Ledger, order: str) -> None:
        orders = [f"{number % 5} {order}" for number in range(20)]
        with shop.app.producer_pool.acquire(block=True) as producer:
            results = [pack.apply_async((one,), producer=producer) for one in orders]

        assert len({result.id for result in results}) == 5
        receipts = [result.get(timeout=SOON)["receipt"] for result in results]
        assert len(set(receipts)) == 5
        assert [len(ledger.runs(one)) for one in orders[:5]] == [1] * 5


class TestCallsThatArePublishedAllTheSame:
    def test_one_with_a_link(self, ledger: Ledger, order: str) -> None:
        ledger.hold(order)
        first = pack.delay(order)
        ledger.wait_for_run(order)
        duplicate = pack.apply_async((order,), link=report.s(order))
        ledger.release(order)

        assert duplicate.id != first.id
        assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
        eventually(lambda: len(ledger.notes(order)) == 1, "the link is followed")
        assert len(ledger.runs(order)) == 1

    def test_one_at_the_head_of_a_chain(self, ledger: Ledger, order: str) -> None:
        receipt = pack.delay(order).get(timeout=SOON)

        assert chain(pack.s(order), report.s(order)).delay().get(timeout=SOON) == receipt
        assert len(ledger.runs(order)) == 1

    def test_one_at_the_end_of_a_chain(self, ledger: Ledger, order: str) -> None:
        receipt = pack.delay(order).get(timeout=SOON)

        assert chain(report.si(1, order), pack.si(order)).delay().get(timeout=SOON) == receipt
        assert len(ledger.runs(order)) == 1

    def test_one_that_takes_a_tasks_place(self, ledger: Ledger, order: str) -> None:
        receipt = pack.delay(f"replacement of {order}").get(timeout=SOON)

        assert hand_over.delay(order).get(timeout=SOON) == receipt
        assert len(ledger.runs(f"replacement of {order}")) == 1

    def test_one_that_goes_through_ungated(self, ledger: Ledger, order: str) -> None:
        for _ in range(2):
            pack.apply_async((order,), idempotency_key=False).get(timeout=SOON)

        assert len(ledger.runs(order)) == 2


class TestAfterAnErrorWithFinishedSteps:
    """The record that keeps the steps is reserved for nobody, until someone publishes."""

    @pytest.fixture
    def broken_off(self, order: str) -> tuple[str, str, str]:
        arguments = (order, "charge", "error")
        with pytest.raises(OutOfStockError):
            ship.delay(*arguments).get(timeout=SOON)
        return arguments

    def test_there_is_one_message(self, shop: Shop, broken_off: tuple[str, str, str]) -> None:
        # The queue alone: the failed message may be yet to be acknowledged.
        before = shop.redis.llen(NOBODYS_QUEUE)
        results = [ship.apply_async(broken_off, queue=NOBODYS_QUEUE) for _ in range(3)]

        assert len({result.id for result in results}) == 1
        assert shop.redis.llen(NOBODYS_QUEUE) == before + 1

    def test_a_failed_publish_gives_the_key_back_and_keeps_the_steps(
        self, ledger: Ledger, order: str, broken_off: tuple[str, str, str]
    ) -> None:
        with nowhere() as connection, pytest.raises(OperationalError):
            ship.apply_async(broken_off, connection=connection, retry=False)

        assert ship.delay(*broken_off).get(timeout=SOON)
        assert ledger.notes(order) == ["charge", "book", "mail"]
