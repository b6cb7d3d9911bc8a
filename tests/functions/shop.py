"""The same idempotent function as a blocking one and as a coroutine function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from celery_idempotent import Idempotency, State
from celery_idempotent.store.run_sync import run_sync

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Shop:
    """Makes idempotent functions of a kind, ``blocking`` or ``async``; calls of both block."""

    def __init__(self, idem: Idempotency, run: Run, kind: str) -> None:
        self.idem = idem
        self.kind = kind
        #: The orders whose function has run.
        self.runs: list[Any] = []
        self._run = run

    def idempotent(self, body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Returns an idempotent function that runs `body`."""
        options = {"key": "order:{order}", "name": "shop.charge", **options}
        if self.kind == "blocking":

            def charge(order: str, amount: int = 0) -> Any:
                self.runs.append(order)
                return body(order)

            return self.idem.idempotent(**options)(charge)

        async def acharge(order: str, amount: int = 0) -> Any:
            self.runs.append(order)
            await asyncio.sleep(0)
            return body(order)

        call = self.idem.idempotent(**options)(acharge)
        return lambda *args, **kwargs: self._run(call(*args, **kwargs))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs `coroutine` in an event loop of its own."""
        return self._run(coroutine)

    def state(self, order: str) -> State | None:
        """Returns the state of the order's record."""
        key = self.idem.idempotent(key="order:{order}", name="shop.charge")(
            lambda order, amount=0: None
        ).idempotency_key_of(order)
        record = run_sync(self.idem.executor.store.get(key))
        return record and record.state
