"""``idempotency_on_conflict``: a duplicate arrives during the first execution."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_idempotent import ConflictError
from tests.waiting import SOON
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import ignoring, pack, raising, rejecting

pytestmark = pytest.mark.worker


@pytest.fixture
def held(shop: Shop, order: str) -> Iterator[str]:
    """An order whose executions wait."""
    shop.ledger.hold(order)
    yield order
    shop.ledger.release(order)


class TestRetry:
    """The default."""

    @pytest.mark.exhaustive
    def test_duplicate_is_requeued_until_it_gets_the_result(
        self, shop: Shop, ledger: Ledger, held: str
    ) -> None:
        """It does not count as a retry of the task."""
        first = ledger.start(pack, held)
        duplicate = pack.delay(held)
        ledger.wait_for_signal(duplicate.id, "conflicted")
        assert duplicate.state == "PENDING"
        ledger.release(held)

        assert duplicate.get(timeout=SOON) == first.get(timeout=SOON)
        assert len(ledger.runs(held)) == 1
        logs = [worker.logs() for worker in shop.workers]
        assert "".join(logs).count(f"[{duplicate.id}] received") == 1, "the first time only"

    def test_requeued_duplicates_do_not_block_the_pool(self, ledger: Ledger, held: str) -> None:
        ledger.start(pack, held)
        # More duplicates than the pool has processes.
        for duplicate in [pack.delay(held) for _ in range(5)]:
            ledger.wait_for_signal(duplicate.id, "conflicted")

        assert pack.delay(f"another {held}").get(timeout=SOON)


class TestRaise:
    def test_the_duplicate_alone_fails(self, ledger: Ledger, held: str) -> None:
        first = ledger.start(raising, held)

        with pytest.raises(ConflictError, match=first.id) as caught:
            raising.delay(held).get(timeout=SOON)
        assert caught.value.task_id == first.id
        ledger.release(held)
        assert first.get(timeout=SOON)["receipt"]
        assert len(ledger.runs(held)) == 1


class TestIgnore:
    def test_duplicate_has_no_outcome(self, shop: Shop, ledger: Ledger, held: str) -> None:
        first = ledger.start(ignoring, held)
        duplicate = ledger.duplicate(ignoring, held)
        ledger.release(held)

        first.get(timeout=SOON)
        shop.wait_until_empty()
        assert duplicate.state == "PENDING"
        assert len(ledger.runs(held)) == 1


class TestReject:
    def test_message_is_rejected(self, shop: Shop, ledger: Ledger, held: str) -> None:
        first = ledger.start(rejecting, held)
        duplicate = rejecting.delay(held)
        shop.workers[0].wait_for_log(f"task {duplicate.id} is rejected as a duplicate")
        ledger.release(held)

        first.get(timeout=SOON)
        shop.wait_until_empty()
        assert len(ledger.runs(held)) == 1
