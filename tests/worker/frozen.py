"""A worker that is frozen amid a task, for longer than its lease."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.ledger import Heard, Run

#: Seconds. Recovery may take a few of these, where a default lease takes sixty.
LEASE = 2.0

#: Of the worker to be frozen: what it has asked the broker for would be stuck with it.
FIRST_QUEUE = "first"


@dataclass(frozen=True)
class Thawed:
    """What came of an execution that was frozen past its lease, and of the one that took over."""

    frozen: Run
    winner: Run
    receipts: tuple[Any, Any]
    signals_of_frozen: list[Heard]
    notes: list[str]


def freeze_past_the_lease(shop: Shop, task: Any, order: str, within: str = "") -> Thawed:
    """Freeze a worker amid `task`, let a duplicate take over on another one, and thaw it.

    Args:
        within: the step during which it is frozen; before the first one if empty.
    """
    ledger = shop.ledger
    execution_id = shop.start_worker("--queues", FIRST_QUEUE, concurrency=1)
    held = f"{within} of {order}" if within else order
    ledger.hold(held)
    first = task.apply_async((order,), queue=FIRST_QUEUE)
    ledger.wait_for_run(order)
    if within:
        eventually(lambda: within in ledger.notes(order), f"{within} is under way")
    execution_id.freeze()
    shop.start_worker(concurrency=1)
    ledger.release(held)
    duplicate = task.delay(order)
    receipt = duplicate.get(timeout=SOON)
    winner = ledger.runs(order)[1]
    execution_id.thaw()
    late_receipt = first.get(timeout=SOON)
    eventually(lambda: ledger.runs(order)[0].end, "the thawed execution ends")
    shop.wait_until_empty()
    return Thawed(
        frozen=ledger.runs(order)[0],
        winner=winner,
        receipts=(late_receipt, receipt),
        signals_of_frozen=ledger.signals(first.id),
        notes=ledger.notes(order),
    )
