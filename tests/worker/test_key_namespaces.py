"""Keys that callers bring never meet the keys that rules derive: an attack, and every rule."""

from __future__ import annotations

import pytest

from tests.waiting import SOON
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import charge

pytestmark = pytest.mark.worker


class TestAttackByAnExplicitKey:
    """The rule of `charge` is ``"order:{order}"``; an attacker passes its text as an own key."""

    def test_explicit_key_order_43000_does_not_block_order_43000(self, ledger: Ledger) -> None:
        attack = charge.apply_async(("another order", 1), idempotency_key="order:43000")
        attack.get(timeout=SOON)

        assert charge.delay("43000", 999).get(timeout=SOON)["amount"] == 999
        assert len(ledger.runs("43000")) == 1

    def test_explicit_key_order_43001_does_not_hold_order_43001(self, ledger: Ledger) -> None:
        ledger.hold("held order")
        attack = charge.apply_async(("held order", 1), idempotency_key="order:43001")
        ledger.wait_for_run("held order")

        assert charge.delay("43001", 999).get(timeout=SOON)["amount"] == 999

        ledger.release("held order")
        attack.get(timeout=SOON)

    def test_explicit_key_order_43002_does_not_read_order_43002(self, shop: Shop) -> None:
        receipt = charge.delay("43002", 999).get(timeout=SOON)

        guess = charge.apply_async(("43002", 999), idempotency_key="order:43002")

        assert charge.idempotency_record("43002", 999).result == receipt
        assert guess.get(timeout=SOON) != receipt
        assert charge.idempotency_record(idempotency_key="order:43002").task_id == guess.id
