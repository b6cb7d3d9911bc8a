"""The delay after which a message is requeued while the store is unavailable."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from celery_idempotent.errors import IdempotencyError, StoreUnavailableError
from celery_idempotent.flow import flow
from celery_idempotent.key.key import Key
from celery_idempotent.settings import Settings
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.outage import OutageLogger


class Message:
    """A message that was requeued often."""

    sender = None
    key = Key("shop.charge", "digest")
    decision = label = ""
    task_id = "1"
    unanswered_ids = b""
    requeue_count = 20
    settings = Settings(lease=7200.0)

    def requeue(self, seconds: float, unanswered_ids: bytes, reason: IdempotencyError) -> None:
        self.seconds, self.unanswered_ids = seconds, unanswered_ids


def test_not_much_after_the_store_however_long_the_lease() -> None:
    message: Any = Message()
    runtime: Any = SimpleNamespace(
        store=SimpleNamespace(outage=OutageLogger(StoreConfig(url="redis://shop")))
    )

    codec: Any = None
    executor.without_store(message, runtime, codec, b"this begin", StoreUnavailableError("away"))

    assert 0.75 * 30 <= message.seconds <= 30
    assert message.unanswered_ids == b"this begin"
