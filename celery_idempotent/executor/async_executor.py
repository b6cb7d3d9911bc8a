"""The gate for code on an event loop."""

from __future__ import annotations

from typing import Any

from celery_idempotent.executor.call import Caller
from celery_idempotent.executor.executor import enter
from celery_idempotent.executor.runtime.asyncio import Loop
from celery_idempotent.payload.codec import Payloads
from celery_idempotent.store.async_record_store import AsyncRecordStore


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
