"""The gate for code on an event loop."""

from __future__ import annotations

from typing import Any

from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.executor import enter
from celery_idempotent.executor.runtime.asyncio import AsyncioRuntime
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.store.async_record_store import AsyncRecordStore


class AsyncExecutor:
    """As `Gate`, and awaited; for any number of event loops."""

    def __init__(self, store: AsyncRecordStore, codec: PayloadCodec) -> None:
        self.store = store
        self.codec = codec

    async def enter(self, call: ExecutorCall) -> Any:
        """As :meth:`Gate.enter`; where it is cancelled, the key is given back."""
        runtime = AsyncioRuntime(self.store)
        outcome = await runtime.drive(enter(call, runtime, self.codec))
        return outcome.get()
