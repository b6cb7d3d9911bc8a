"""Calls that carry their own key, and tasks without one or with that of their message."""

from __future__ import annotations

from uuid import UUID

import pytest
from celery import group

from celery_idempotent import KeyReusedError, KeyRuleError, State
from tests.waiting import SOON
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.shop import charge, flaky, open_door, pack, tick, try_later

pytestmark = pytest.mark.worker


class TestACallsOwnKey:
    def test_makes_duplicates_of_calls_through_apply_async(
        self, ledger: Ledger, order: str
    ) -> None:
        receipts = [
            pack.apply_async((order,), idempotency_key=f"request {order}").get(timeout=SOON)
            for _ in range(2)
        ]

        assert receipts[0] == receipts[1]
        assert len(ledger.runs(order)) == 1

    def test_is_another_key_than_the_rules(self, ledger: Ledger, order: str) -> None:
        pack.delay(order).get(timeout=SOON)

        pack.apply_async((order,), idempotency_key=f"request {order}").get(timeout=SOON)

        assert len(ledger.runs(order)) == 2

    def test_outranks_the_tasks_rule(self, ledger: Ledger, order: str) -> None:
        for request in ("one", "two", "one"):
            key = f"{request} {order}"
            charge.apply_async((order,), idempotency_key=key).get(timeout=SOON)

        assert len(ledger.runs(order)) == 2

    def test_comes_with_a_signature(self, ledger: Ledger, order: str) -> None:
        signature = pack.s(order).set(idempotency_key=f"request {order}")

        first = signature.delay().get(timeout=SOON)

        assert signature.clone().apply_async().get(timeout=SOON) == first
        again = pack.apply_async((order,), idempotency_key=f"request {order}")
        assert again.get(timeout=SOON) == first
        assert len(ledger.runs(order)) == 1

    def test_comes_with_signatures_in_a_canvas(self, ledger: Ledger, order: str) -> None:
        members = [pack.s(order).set(idempotency_key=f"{n} {order}") for n in (1, 2, 1)]

        receipts = group(members).delay().get(timeout=SOON)

        assert receipts[0] == receipts[2] != receipts[1]
        assert len(ledger.runs(order)) == 2

    def test_comes_by_header_from_where_the_code_is_not(
        self, shop: Shop, ledger: Ledger, order: str
    ) -> None:
        key = f"request {order}"
        first = shop.app.send_task("shop.pack", (order,), headers={"idempotency_key": key})

        second = pack.apply_async((order,), idempotency_key=key)

        assert second.get(timeout=SOON) == first.get(timeout=SOON)
        assert len(ledger.runs(order)) == 1

    def test_may_be_a_number_or_a_uuid_and_equals_its_text(
        self, ledger: Ledger, order: str
    ) -> None:
        for key in (UUID(order), str(UUID(order))):
            pack.apply_async((order,), idempotency_key=key).get(timeout=SOON)
        for key in (int(order, 16), str(int(order, 16))):
            pack.apply_async((order,), idempotency_key=key).get(timeout=SOON)

        assert len(ledger.runs(order)) == 2

    @pytest.mark.parametrize("key", ["", True, 1.5, ["a"]], ids=repr)
    def test_that_is_none_is_refused_at_the_caller(
        self, shop: Shop, order: str, key: object
    ) -> None:
        with pytest.raises(KeyRuleError, match=r"shop\.pack: idempotency_key must be"):
            pack.apply_async((order,), idempotency_key=key)

    def test_with_other_arguments_is_refused(self, ledger: Ledger, order: str) -> None:
        key = f"request {order}"
        pack.apply_async((order, 1), idempotency_key=key).get(timeout=SOON)

        with pytest.raises(KeyReusedError):
            pack.apply_async((order, 2), idempotency_key=key).get(timeout=SOON)

    def test_names_the_record(self, shop: Shop, order: str) -> None:
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


class TestNoKey:
    """``idempotency_key=False`` for one call, ``idempotency_enabled=False`` for a task."""

    def test_lets_one_call_through(self, ledger: Ledger, order: str) -> None:
        first = pack.delay(order).get(timeout=SOON)

        ungated = pack.apply_async((order,), idempotency_key=False).get(timeout=SOON)

        assert ungated != first
        assert [run.protected for run in ledger.runs(order)] == [True, False]

    def test_lets_one_call_through_by_header(self, shop: Shop, ledger: Ledger, order: str) -> None:
        for _ in range(2):
            shop.app.send_task("shop.pack", (order,), headers={"idempotency_key": False}).get(
                timeout=SOON
            )

        assert len(ledger.runs(order)) == 2

    def test_leaves_no_record(self, shop: Shop, order: str) -> None:
        pack.apply_async((order,), idempotency_key=False).get(timeout=SOON)

        assert pack.idempotency_record(order) is None

    def test_needs_no_errors_to_be_released(self, ledger: Ledger, order: str) -> None:
        result = flaky.apply_async((order,), idempotency_key=False)
        result.get(timeout=SOON, propagate=False)

        assert ledger.signals(result.id) == []

    def test_lets_every_call_of_a_task_through(self, ledger: Ledger, order: str) -> None:
        receipts = [open_door.delay(order).get(timeout=SOON)["receipt"] for _ in range(2)]

        assert receipts[0] != receipts[1]
        assert len(ledger.runs(order)) == 2


class TestTheMessagesKey:
    """``idempotency_key=TASK_ID``."""

    def test_two_calls_are_two_runs(self, ledger: Ledger, order: str) -> None:
        for _ in range(2):
            tick.delay(order).get(timeout=SOON)

        assert len(ledger.runs(order)) == 2

    def test_copies_of_one_message_are_one_run(self, ledger: Ledger, order: str) -> None:
        first = tick.apply_async((order,), task_id=f"tick {order}")
        receipt = first.get(timeout=SOON)
        tick.apply_async((order,), task_id=f"tick {order}")
        ledger.wait_for_signal(first.id, "replayed")

        assert first.get(timeout=SOON) == receipt
        assert len(ledger.runs(order)) == 1

    def test_names_the_record(self, shop: Shop, order: str) -> None:
        result = tick.delay(order)
        receipt = result.get(timeout=SOON)

        assert tick.idempotency_record(result.id).result == receipt
