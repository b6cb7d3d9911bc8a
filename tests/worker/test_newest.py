"""Bursts whose calls differ in an argument that the key leaves out: the newest ones win."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain

from celery_idempotent.extensions.newest import MAX_BYTES
from tests.conftest import exhaustive_except
from tests.waiting import SOON, eventually
from tests.worker.harness import COPIED_MESSAGES, OpenShop, Shop
from tests.worker.tasks import burst_of, pack

#: A busy machine may let a running call miss its heartbeats for some seconds.
SHOP = {"idempotency_lease": 8.0, **COPIED_MESSAGES}


def amounts(shop: Shop, order: str) -> list[str]:
    return [note.split()[1] for note in shop.ledger.notes(order) if note.startswith("runs ")]


def test_one_waits_and_runs_with_the_newest(shop: Shop, order: str) -> None:
    shop.ledger.start(burst_of, order, 1)
    results = [burst_of.delay(order, amount) for amount in (2, 3, 4)]
    shop.ledger.release(order)

    assert len({result.id for result in results}) == 1
    assert [result.get(timeout=SOON)["amount"] for result in results] == [4, 4, 4]
    shop.wait_until_empty()
    assert shop.ledger.notes(order)[-3:] == ["before 4", "runs 4 as 4", "success 4"]
    assert amounts(shop, order) == ["1", "4"]


def test_the_first_arguments_may_be_the_newest(shop: Shop, order: str) -> None:
    shop.ledger.start(burst_of, order, 1)
    *_, last = [burst_of.delay(order, amount) for amount in (2, 3, 2)]
    shop.ledger.release(order)

    assert last.get(timeout=SOON)["amount"] == 2


@pytest.mark.parametrize("serializer", exhaustive_except(["json", "pickle"], "json"))
def test_newest_arguments_are_encrypted(open_shop: OpenShop, order: str, serializer: str) -> None:
    key = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
    content = {"task_serializer": serializer, "accept_content": ["pickle", "json"]}
    with open_shop(**content, idempotency_encryption_keys=[key]) as shop:
        burst_of.delay(order, 1)
        last = burst_of.apply_async((order,), {"amount": 2})
        burst_of.delay(order, 987654)
        stored = b"".join(shop.redis.get(name) for name in shop.redis.keys("idem:*"))
        shop.start_worker(concurrency=1, C_FORCE_ROOT="1")

        assert b"987654" not in stored
        assert last.get(timeout=SOON)["amount"] == 987654
        shop.wait_until_empty()
        notes = shop.ledger.notes(order)
        assert notes == ["before 987654", "runs 987654 as 987654", "success 987654"]


def test_a_retry_has_the_newest(shop: Shop, order: str) -> None:
    shop.ledger.start(burst_of, order, 1)
    burst_of.delay(order, 2, fails=1)
    last = burst_of.delay(order, 3, fails=1)
    shop.ledger.release(order)

    assert last.get(timeout=SOON)["amount"] == 3
    assert amounts(shop, order) == ["1", "3", "3"]


def test_a_takeover_has_the_newest(shop: Shop, order: str) -> None:
    shop.ledger.hold(order)
    burst_of.apply_async((order, 1), countdown=2)
    last = burst_of.delay(order, 3)
    shop.ledger.kill(order)
    shop.ledger.release(order)

    assert last.get(timeout=SOON)["amount"] == 3
    assert set(amounts(shop, order)) == {"3"}


def test_a_newer_message_answers_for_a_dead_one(shop: Shop, order: str) -> None:
    first = shop.ledger.start(burst_of, order, 1)
    newer = shop.ledger.duplicate(burst_of, order, 2)
    shop.ledger.kill(order)
    eventually(lambda: len(shop.ledger.runs(order)) == 2, "one of them begins")
    shop.ledger.release(order)

    assert newer.get(timeout=SOON)["amount"] == 2
    assert first.get(timeout=SOON)["amount"] in (1, 2)
    assert amounts(shop, order)[-1] == "2"


class TestPublishedInAnyCase:
    @pytest.fixture(autouse=True)
    def running(self, shop: Shop, order: str) -> Iterator[None]:
        """A call runs, another one waits, until the test has published its own."""
        shop.ledger.start(burst_of, order, 1)
        self.older = burst_of.delay(order, 2)
        yield
        shop.wait_until_empty()

    def test_large_arguments_take_the_place(self, shop: Shop, order: str) -> None:
        large = "x" * MAX_BYTES
        newer = burst_of.delay(order, large)
        shop.ledger.release(order)

        assert newer.id != self.older.id
        assert newer.get(timeout=SOON)["amount"] == self.older.get(timeout=SOON)["amount"] == large
        assert amounts(shop, order) == ["1", large]

    def test_so_do_an_own_id_and_a_canvas(self, shop: Shop, order: str) -> None:
        own = burst_of.apply_async((order, 3), task_id=f"own {order}")
        first, second = (
            chain(burst_of.si(order, amount), pack.si(f"{amount} {order}")).apply_async()
            for amount in (4, 5)
        )
        newest = burst_of.delay(order, 6)
        shop.ledger.release(order)

        answered = (self.older, own, first.parent, second.parent, newest)
        assert [each.get(timeout=SOON)["amount"] for each in answered] == [6] * 5
        assert newest.id == second.parent.id
        assert amounts(shop, order) == ["1", "6"]
        assert first.get(timeout=SOON)
        assert second.get(timeout=SOON)

    def test_an_unsent_one_is_not_awaited(self, shop: Shop, order: str, monkeypatch: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(shop.app, "send_task", _refuse)
            with pytest.raises(OSError, match="away"):
                burst_of.delay(order, "x" * MAX_BYTES)
        shop.ledger.release(order)

        assert self.older.get(timeout=SOON)["amount"] == 2


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError("the broker is away")
