"""The executor for code on an event loop."""

from __future__ import annotations

from typing import Any

from celery_idempotent.executor.call import ExecutorCall
from celery_idempotent.executor.executor import execute
from celery_idempotent.executor.runtime.asyncio import AsyncioRuntime
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.store.record_store import RecordStore


class AsyncExecutor:
    """As `Executor`, awaited; for any number of event loops."""

    def __init__(self, store: RecordStore, codec: PayloadCodec) -> None:
        self.store = store
        self.codec = codec.for_asyncio()

    async def enter(self, call: ExecutorCall) -> Any:
        """As :meth:`Executor.enter`. If it is cancelled, the key is released."""
        runtime = AsyncioRuntime(self.store)
        outcome = await runtime.drive(execute(call, runtime, self.codec))
        return outcome.get()
