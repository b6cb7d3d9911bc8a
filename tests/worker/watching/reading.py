"""What is read of a worker, and how its pool processes are killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

from tests.waiting import SOON
from tests.worker.harness import Shop


def inspect(shop: Shop, command: str) -> Any:
    """Returns the reply of the only worker to ``celery inspect``."""
    (reply,) = shop.app.control.broadcast(command, reply=True, timeout=SOON, limit=1)
    (value,) = reply.values()
    return value


def counts_of(shop: Shop, task: str) -> Counter[str]:
    """Returns the counts of a task when all its calls have been counted."""
    # A result is there before its call is counted; the message is acknowledged after that.
    shop.wait_until_empty()
    return Counter(inspect(shop, "idempotency_counts").get(task, {}))


def lease_of(shop: Shop, task_id: str) -> dict[str, Any]:
    """Returns the lease of one task; earlier tests may have left others."""
    leases = inspect(shop, "idempotency_leases")
    (lease,) = (lease for lease in leases if lease["task_id"] == task_id)
    return lease


def kill(shop: Shop, order: str) -> None:
    """Kills the pool process that runs `order`."""
    os.kill(shop.ledger.wait_for_run(order).pid, signal.SIGKILL)
