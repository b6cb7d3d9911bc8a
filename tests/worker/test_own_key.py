"""``idempotency_key`` of a call, TASK_ID as a key, and calls without idempotency."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import UUID

import pytest
from celery import chain, group

from celery_idempotent import KeyReusedError, KeyRuleError, State
from tests.waiting import SOON
from tests.worker.failing_tasks import flaky, try_later
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import charge, open_door, pack, reserved, tick

pytestmark = pytest.mark.worker

SERIALIZERS = ["json", "pickle", "msgpack", "yaml"]


class TestKeyOfACall:
    def test_apply_async_with_the_same_key_runs_once(self, ledger: Ledger, order: str) -> None:
        receipts = [
            pack.apply_async((order,), idempotency_key=f"request {order}").get(timeout=SOON)
            for _ in range(2)
        ]

        assert receipts[0] == receipts[1]
        assert len(ledger.runs(order)) == 1

    def test_differs_from_the_key_of_the_rule(self, ledger: Ledger, order: str) -> None:
        pack.delay(order).get(timeout=SOON)

        pack.apply_async((order,), idempotency_key=f"request {order}").get(timeout=SOON)

        assert len(ledger.runs(order)) == 2

    def test_overrides_the_rule_of_the_task(self, ledger: Ledger, order: str) -> None:
        for request in ("one", "two", "one"):
            key = f"{request} {order}"
            charge.apply_async((order,), idempotency_key=key).get(timeout=SOON)

        assert len(ledger.runs(order)) == 2

    def test_of_a_signature(self, ledger: Ledger, order: str) -> None:
        signature = pack.s(order).set(idempotency_key=f"request {order}")

        first = signature.delay().get(timeout=SOON)

        assert signature.clone().apply_async().get(timeout=SOON) == first
        duplicate = pack.apply_async((order,), idempotency_key=f"request {order}")
        assert duplicate.get(timeout=SOON) == first
        assert len(ledger.runs(order)) == 1

    def test_of_signatures_in_a_canvas(self, ledger: Ledger, order: str) -> None:
        members = [pack.s(order).set(idempotency_key=f"{n} {order}") for n in (1, 2, 1)]

        receipts = group(members).delay().get(timeout=SOON)

        assert receipts[0] == receipts[2] != receipts[1]
        assert len(ledger.runs(order)) == 2

    def test_in_a_header_of_send_task(self, shop: Shop, ledger: Ledger, order: str) -> None:
        key = f"request {order}"
        first = shop.app.send_task("shop.pack", (order,), headers={"idempotency_key": key})

        second = pack.apply_async((order,), idempotency_key=key)

        assert second.get(timeout=SOON) == first.get(timeout=SOON)
        assert len(ledger.runs(order)) == 1

    def test_number_or_uuid_equals_its_text(self, ledger: Ledger, order: str) -> None:
        for key in (UUID(order), str(UUID(order))):
            pack.apply_async((order,), idempotency_key=key).get(timeout=SOON)
        for key in (int(order, 16), str(int(order, 16))):
            pack.apply_async((order,), idempotency_key=key).get(timeout=SOON)

        assert len(ledger.runs(order)) == 2

    @pytest.mark.parametrize("key", ["", True, 1.5, ("a", "")], ids=repr)
    def test_invalid_key_is_rejected_at_publish(self, shop: Shop, order: str, key: object) -> None:
        with pytest.raises(KeyRuleError, match=r"shop\.pack: idempotency_key must be"):
            pack.apply_async((order,), idempotency_key=key)

    def test_with_other_arguments_is_rejected(self, ledger: Ledger, order: str) -> None:
        key = f"request {order}"
        pack.apply_async((order, 1), idempotency_key=key).get(timeout=SOON)

        with pytest.raises(KeyReusedError):
            pack.apply_async((order, 2), idempotency_key=key).get(timeout=SOON)

    def test_identifies_the_record(self, shop: Shop, order: str) -> None:
        key = f"request {order}"
        first = pack.apply_async((order,), idempotency_key=key)
        receipt = first.get(timeout=SOON)

        record = pack.idempotency_record(order, idempotency_key=key)

        assert record.state is State.COMPLETED
        assert (record.task_id, record.result) == (first.id, receipt)
        assert pack.idempotency_record(order) is None

    def test_survives_a_countdown(self, ledger: Ledger, order: str) -> None:
        results = [
            pack.apply_async((order,), idempotency_key=f"request {order}", countdown=0.3)
            for _ in range(2)
        ]

        receipts = [result.get(timeout=SOON) for result in results]

        assert receipts[0] == receipts[1]
        assert len(ledger.runs(order)) == 1

    def test_survives_a_retry(self, ledger: Ledger, order: str) -> None:
        key = f"request {order}"
        first = try_later.apply_async((order, 0.1), idempotency_key=key).get(timeout=SOON)

        second = try_later.apply_async((order, 0.1), idempotency_key=key).get(timeout=SOON)

        assert second == first
        assert len(ledger.runs(order)) == 2, "the run that retried, and the one that returned"

    def test_survives_a_conflict(self, ledger: Ledger, order: str) -> None:
        key = f"request {order}"
        ledger.hold(order)
        first = pack.apply_async((order,), idempotency_key=key)
        ledger.wait_for_run(order)
        duplicate = pack.apply_async((order,), idempotency_key=key)
        ledger.wait_for_signal(duplicate.id, "conflicted")
        ledger.release(order)

        assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)


class TestTuple:
    """A key of several parts: a tenant, and the id of its request."""

    def test_tenants_do_not_share_keys(self, ledger: Ledger, order: str) -> None:
        for key in (("a", f"b{order}"), ("ab", order), ("a", f"b{order}")):
            pack.apply_async((order,), idempotency_key=key).get(timeout=SOON)

        assert len(ledger.runs(order)) == 2

    def test_numbers_and_uuids_equal_their_texts(self, ledger: Ledger, order: str) -> None:
        for key in ((7, UUID(order)), ["7", str(UUID(order))]):
            pack.apply_async((order,), idempotency_key=key).get(timeout=SOON)

        assert len(ledger.runs(order)) == 1

    def test_identifies_the_record(self, shop: Shop, order: str) -> None:
        first = pack.apply_async((order,), idempotency_key=("acme", UUID(order)))
        receipt = first.get(timeout=SOON)

        record = pack.idempotency_record(idempotency_key=("acme", UUID(order)))

        assert (record.task_id, record.result, record.explicit) == (first.id, receipt, True)
        assert pack.idempotency_forget(idempotency_key=["acme", str(UUID(order))])
        assert pack.idempotency_record(idempotency_key=("acme", UUID(order))) is None

    def test_survives_a_retry_and_a_conflict(self, ledger: Ledger, order: str) -> None:
        key = ("acme", order)
        retried = try_later.apply_async((order, 0.1), idempotency_key=key).get(timeout=SOON)
        assert try_later.apply_async((order, 0.1), idempotency_key=key).get(timeout=SOON) == retried

        ledger.hold(f"held {order}")
        first = pack.apply_async((f"held {order}",), idempotency_key=key)
        ledger.wait_for_run(f"held {order}")
        duplicate = pack.apply_async((f"held {order}",), idempotency_key=key)
        ledger.wait_for_signal(duplicate.id, "conflicted")
        ledger.release(f"held {order}")

        assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)

    def test_is_reserved_at_publish(self, ledger: Ledger, order: str) -> None:
        first, second = (
            reserved.apply_async((order,), idempotency_key=("acme", order)) for _ in range(2)
        )

        assert second.id == first.id
        assert second.get(timeout=SOON) == first.get(timeout=SOON)
        assert len(ledger.runs(order)) == 1


class TestSerializers:
    """The key is the same whatever the message is encoded with."""

    @pytest.fixture(scope="class")
    @staticmethod
    def shared_shop(open_shop: Callable[..., Shop]) -> Iterator[Shop]:
        with open_shop(accept_content=SERIALIZERS) as shop:
            shop.start_worker(C_FORCE_ROOT="1")
            yield shop

    @pytest.mark.parametrize("serializer", SERIALIZERS)
    def test_of_messages_and_canvases(
        self, shop: Shop, ledger: Ledger, order: str, serializer: str
    ) -> None:
        key = ("acme", UUID(order))
        call = pack.si(order).set(idempotency_key=key, serializer=serializer)
        first = call.apply_async().get(timeout=SOON)

        if serializer != "yaml":  # which writes no signatures
            in_chain = chain(pack.si(f"first {order}").set(serializer=serializer), call)
            assert in_chain.apply_async(serializer=serializer).get(timeout=SOON) == first
        duplicate = pack.apply_async((order,), idempotency_key=key)
        assert duplicate.get(timeout=SOON) == first
        assert len(ledger.runs(order)) == 1


class TestIdempotencyDisabled:
    """``idempotency_key=False`` for one call, ``idempotency_enabled=False`` for a task."""

    def test_for_one_call(self, ledger: Ledger, order: str) -> None:
        first = pack.delay(order).get(timeout=SOON)

        unprotected = pack.apply_async((order,), idempotency_key=False).get(timeout=SOON)

        assert unprotected != first
        assert [run.protected for run in ledger.runs(order)] == [True, False]

    def test_for_one_call_by_header(self, shop: Shop, ledger: Ledger, order: str) -> None:
        for _ in range(2):
            shop.app.send_task("shop.pack", (order,), headers={"idempotency_key": False}).get(
                timeout=SOON
            )

        assert len(ledger.runs(order)) == 2

    def test_stores_no_record(self, shop: Shop, order: str) -> None:
        pack.apply_async((order,), idempotency_key=False).get(timeout=SOON)

        assert pack.idempotency_record(order) is None

    def test_sends_no_signals(self, ledger: Ledger, order: str) -> None:
        result = flaky.apply_async((order,), idempotency_key=False)
        result.get(timeout=SOON, propagate=False)

        assert ledger.signals(result.id) == []

    def test_for_a_task(self, ledger: Ledger, order: str) -> None:
        receipts = [open_door.delay(order).get(timeout=SOON)["receipt"] for _ in range(2)]

        assert receipts[0] != receipts[1]
        assert len(ledger.runs(order)) == 2


class TestTaskIdKey:
    """``idempotency_key=TASK_ID``."""

    def test_two_calls_run_twice(self, ledger: Ledger, order: str) -> None:
        for _ in range(2):
            tick.delay(order).get(timeout=SOON)

        assert len(ledger.runs(order)) == 2

    def test_copies_of_one_message_run_once(self, ledger: Ledger, order: str) -> None:
        first = tick.apply_async((order,), task_id=f"tick {order}")
        receipt = first.get(timeout=SOON)
        tick.apply_async((order,), task_id=f"tick {order}")
        ledger.wait_for_signal(first.id, "replayed")

        assert first.get(timeout=SOON) == receipt
        assert len(ledger.runs(order)) == 1

    def test_identifies_the_record(self, shop: Shop, order: str) -> None:
        result = tick.delay(order)
        receipt = result.get(timeout=SOON)

        assert tick.idempotency_record(result.id).result == receipt
