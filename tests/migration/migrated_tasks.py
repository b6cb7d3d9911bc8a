"""Tasks as they are after a migration from celery-once or celery-singleton."""

from __future__ import annotations

from typing import Any

from tests.worker.ledger import Ledger
from tests.worker.tasks import handle, run_out, task_of

ONE_AT_A_TIME = {"idempotency_until": "finished", "idempotency_dedupe_publish": True}
COLLAPSED = {"idempotency_until": "started", "idempotency_dedupe_publish": True}


def retry_once(self: Any, order: str, countdown: float) -> str:
    """Retries in the first execution."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        if len(ledger.runs(order)) == 1:
            raise self.retry(countdown=countdown)
        return "retried"


single = task_of(handle, "single", **ONE_AT_A_TIME)
single_by_order = task_of(
    handle, "single_by_order", idempotency_key=("order",), idempotency_lease=2.0, **ONE_AT_A_TIME
)
single_failing = task_of(run_out, "single_failing", **ONE_AT_A_TIME)
single_retrying = task_of(retry_once, "single_retrying", **ONE_AT_A_TIME)
short_wait_in_queue = task_of(
    handle, "short_wait_in_queue", idempotency_reservation_ttl=1.0, **ONE_AT_A_TIME
)
collapsed = task_of(handle, "collapsed_migrated", **COLLAPSED)
collapsed_by_order = task_of(handle, "collapsed_by_order", idempotency_key=("order",), **COLLAPSED)
