"""Executions that exceed the broker's visibility timeout and fail.

The broker redelivers the message. The copy is requeued as a new message while the execution runs,
and later gets the stored error.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.waiting import SOON
from tests.worker.harness import COPIED_MESSAGES, Shop
from tests.worker.tasks import (
    AFTER_VISIBILITY_TIMEOUT,
    poll_late,
)

pytestmark = pytest.mark.worker


@pytest.mark.exhaustive
class TestExecutionThatRetries:
    def test_copy_does_not_run_before_the_retry(
        self, open_shop: Callable[..., Shop], order: str
    ) -> None:
        with open_shop(**COPIED_MESSAGES) as shop:
            shop.start_worker(concurrency=4)
            result = poll_late.delay(order, countdown=AFTER_VISIBILITY_TIMEOUT, times=2)

            assert result.get(timeout=2 * SOON) == "done"
            shop.wait_until_empty()
            assert shop.ledger.notes(order) == ["0", "1", "2"]
            assert len(shop.ledger.signals(result.id, "conflicted")) > 2

    def test_copy_runs_if_the_retry_is_lost(
        self, open_shop: Callable[..., Shop], order: str
    ) -> None:
        with open_shop(**COPIED_MESSAGES, idempotency_lease=AFTER_VISIBILITY_TIMEOUT) as shop:
            shop.start_worker(concurrency=4)
            result = poll_late.apply_async((order,), {"countdown": 0, "times": 1, "lost": True})
            started_at = time.time()

            assert result.get(timeout=2 * SOON) == "done"
            assert shop.ledger.notes(order) == ["0", "0"]
            assert shop.ledger.runs(order)[1].started_at > started_at + 2 * AFTER_VISIBILITY_TIMEOUT
