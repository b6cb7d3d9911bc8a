"""The gate for code on an event loop."""

from __future__ import annotations

from typing import Any

from celery_idempotent.gate.caller import Caller
from celery_idempotent.gate.gate import enter
from celery_idempotent.gate.loop import Loop
from celery_idempotent.store.async_records import AsyncRecordStore
from celery_idempotent.store.payload import Payloads


class AsyncGate:
    """As `Gate`, and awaited; for any number of event loops."""

    def __init__(self, store: AsyncRecordStore, payloads: Payloads) -> None:
        self.store = store
        self.payloads = payloads

    async def enter(self, call: Caller) -> Any:
        """As :meth:`Gate.enter`; where it is cancelled, the key is given back."""
        world = Loop(self.store)
        outcome = await world.drive(enter(call, world, self.payloads))
        return outcome.get()
