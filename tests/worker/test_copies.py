"""The retry of an execution that exceeds the broker's visibility timeout is lost."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.waiting import SOON
from tests.worker.harness import COPIED_MESSAGES, Shop
from tests.worker.tasks import AFTER_VISIBILITY_TIMEOUT, lose_retry

pytestmark = [pytest.mark.exhaustive, pytest.mark.worker]


def test_a_copy_runs_if_the_retry_is_lost(open_shop: Callable[..., Shop], order: str) -> None:
    with open_shop(**COPIED_MESSAGES, idempotency_lease=AFTER_VISIBILITY_TIMEOUT) as shop:
        shop.start_worker(concurrency=4)
        result = lose_retry.delay(order)
        started_at = time.time()

        assert result.get(timeout=2 * SOON) == "done"
        assert shop.ledger.notes(order) == ["0", "0"]
        assert shop.ledger.runs(order)[1].started_at > started_at + 2 * AFTER_VISIBILITY_TIMEOUT
