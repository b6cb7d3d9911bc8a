"""Freezes a worker during a task, for longer than its lease."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.ledger import ReceivedSignal, Run

#: In seconds, instead of the default of 60.
LEASE = 2.0

#: The queue of the worker that is frozen; a frozen worker may hold messages of its queue.
FIRST_QUEUE = "first"


@dataclass(frozen=True)
class FrozenTakeover:
    """An execution that was frozen past its lease, and the one that took over."""

    frozen: Run
    winner: Run
    receipts: tuple[Any, Any]
    signals_of_frozen: list[ReceivedSignal]
    notes: list[str]


def freeze_past_the_lease(shop: Shop, task: Any, order: str, within: str = "") -> FrozenTakeover:
    """Freezes a worker during `task`, runs a duplicate on another worker, and continues the first.

    Args:
        within: the step during which the worker is frozen; before the first step if empty.
    """
    ledger = shop.ledger
    owner = shop.start_worker("--queues", FIRST_QUEUE, concurrency=1)
    held = f"{within} of {order}" if within else order
    ledger.hold(held)
    first = task.apply_async((order,), queue=FIRST_QUEUE)
    ledger.wait_for_run(order)
    if within:
        eventually(lambda: within in ledger.notes(order), f"step {within} has started")
    owner.freeze()
    shop.start_worker(concurrency=1)
    ledger.release(held)
    duplicate = task.delay(order)
    winner_receipt = duplicate.get(timeout=SOON)
    winner = ledger.runs(order)[1]
    owner.resume()
    frozen_receipt = first.get(timeout=SOON)
    eventually(lambda: ledger.runs(order)[0].end, "the resumed execution ends")
    shop.wait_until_empty()
    return FrozenTakeover(
        frozen=ledger.runs(order)[0],
        winner=winner,
        receipts=(frozen_receipt, winner_receipt),
        signals_of_frozen=ledger.signals(first.id),
        notes=ledger.notes(order),
    )
