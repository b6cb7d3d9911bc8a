"""``self.idempotency``, and calls without a message."""

from __future__ import annotations

from tests.waiting import SOON
from tests.worker.ledger import Ledger
from tests.worker.tasks import pack


def test_an_execution_has_key_token_and_attempt(ledger: Ledger, order: str) -> None:
    pack.delay(order).get(timeout=SOON)

    (run,) = ledger.runs(order)
    record = pack.idempotency_record(order)
    assert run.key == record.key
    assert run.key.startswith("shop.pack:")
    assert run.token == record.token > 0
    assert run.attempt == record.attempt == 1
    assert run.recovered is False
    assert run.protected is True


def test_eager_calls_share_the_key_with_workers(ledger: Ledger, order: str) -> None:
    assert pack.apply((order,)).get() == pack.delay(order).get(timeout=SOON)
    keys = [f"{n} {order}" for n in (1, 2, 1)]
    first, second, third = (pack.apply((order,), idempotency_key=key).get() for key in keys)
    assert first == third != second
    assert len(ledger.runs(order)) == 3
