"""When a message comes back that met an outage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from celery_idempotent.errors import IdempotencyError, StoreUnavailableError
from celery_idempotent.executor import executor as gate
from celery_idempotent.settings import Settings
from celery_idempotent.store.config import Place
from celery_idempotent.store.outage import Outage


class Message:
    """One that has been put back often."""

    sender = None
    key = "shop.charge:digest"
    task_id = "1"
    prior = b""
    returns = 20
    settings = Settings(lease=7200.0, breaker_pause=30.0)

    def come_back(self, seconds: float, prior: bytes, reason: IdempotencyError) -> None:
        self.seconds, self.prior = seconds, prior


def test_not_much_after_the_store_however_long_the_lease() -> None:
    message: Any = Message()
    world: Any = SimpleNamespace(store=SimpleNamespace(outage=Outage(Place(url="redis://shop"))))

    gate.without_store(message, world, b"this pass", StoreUnavailableError("away"))

    assert 0.75 * 30 <= message.seconds <= 30
    assert message.prior == b"this pass"
