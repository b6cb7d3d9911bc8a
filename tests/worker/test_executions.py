"""``self.idempotency``, and calls without a message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_idempotent import KeyReusedError
from tests.waiting import SOON
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import OutOfStockError, call_itself, charge, check_then_handle, final, pack

pytestmark = pytest.mark.worker


class TestSelfIdempotency:
    def test_has_key_token_and_attempt(self, ledger: Ledger, order: str) -> None:
        pack.delay(order).get(timeout=SOON)

        (run,) = ledger.runs(order)
        record = pack.idempotency_record(order)
        assert run.key == record.key
        assert run.key.startswith("shop.pack:")
        assert run.token == record.token > 0
        assert run.attempt == record.attempt == 1
        assert run.recovered is False
        assert run.protected is True

    def test_check_passes_with_a_valid_lease(self, ledger: Ledger, order: str) -> None:
        check_then_handle.delay(order).get(timeout=SOON)

        assert ledger.notes(order) == ["has its lease"]

    def test_is_unprotected_with_idempotency_key_false(self, ledger: Ledger, order: str) -> None:
        pack.apply_async((order,), idempotency_key=False).get(timeout=SOON)

        (run,) = ledger.runs(order)
        assert (run.protected, run.token, run.attempt, run.recovered) == (False, 0, 1, False)

    def test_tokens_of_a_key_grow(self, ledger: Ledger, order: str) -> None:
        pack.delay(order).get(timeout=SOON)
        assert pack.idempotency_forget(order) is True
        pack.delay(order).get(timeout=SOON)

        first, second = ledger.runs(order)
        assert second.token > first.token
        assert second.attempt == 1


class TestPlainCall:
    """``task(1)`` is a function call, as everywhere in Celery."""

    def test_has_no_record_and_ignores_one(self, ledger: Ledger, order: str) -> None:
        receipts = [pack(order)["receipt"] for _ in range(2)]
        assert receipts[0] != receipts[1]
        assert pack.idempotency_record(order) is None
        pack.delay(order).get(timeout=SOON)
        pack(order)

        protected = [run.protected for run in ledger.runs(order)]
        assert protected == [False, False, True, False]

    def test_within_the_same_task_and_key_has_no_conflict(self, ledger: Ledger, order: str) -> None:
        # Otherwise, it would wait for its own caller.
        result = call_itself.apply_async((order, 1), idempotency_key=f"request {order}")

        assert result.get(timeout=SOON) == "1 0"
        assert ledger.signals(result.id, "conflicted") == []


class TestEager:
    """In addition to `tests/flow/test_eager_publish.py`."""

    def test_apply_shares_the_key_with_workers(self, ledger: Ledger, order: str) -> None:
        assert pack.apply((order,)).get() == pack.delay(order).get(timeout=SOON)
        keys = [f"{n} {order}" for n in (1, 2, 1)]
        first, second, third = (pack.apply((order,), idempotency_key=key).get() for key in keys)
        assert first == third != second
        assert len(ledger.runs(order)) == 3

    def test_apply_refuses_other_arguments_and_replays_errors(
        self, ledger: Ledger, order: str
    ) -> None:
        charge.apply((order, 1)).get()
        with pytest.raises(KeyReusedError):
            charge.apply((order, 2)).get()
        for _ in range(2):
            with pytest.raises(OutOfStockError):
                final.apply((order,)).get()
        assert len(ledger.runs(order)) == 2

    @pytest.fixture
    def always_eager(self, shop: Shop) -> Iterator[None]:
        shop.app.conf.task_always_eager = True
        yield
        shop.app.conf.task_always_eager = False

    def test_always_eager_is_idempotent(
        self, always_eager: None, ledger: Ledger, order: str
    ) -> None:
        first, second = pack.delay(order), pack.delay(order)

        assert second.get() == first.get()
        assert [run.task_id for run in ledger.runs(order)] == [first.id]
