"""The delay after which a message is requeued while the store is unavailable."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.extensions.transaction import plan_for
from celery_idempotent.flow import flow
from celery_idempotent.flow.active_call import ActiveCall
from celery_idempotent.flow.call import Call
from celery_idempotent.flow.end import Requeue
from celery_idempotent.key.key import Key
from celery_idempotent.settings import Settings
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.outage import OutageLogger


def test_not_much_after_the_store_however_long_the_lease() -> None:
    settings = Settings(lease=7200.0)
    key = Key("shop.charge", "digest")
    data = Call(None, key, settings, "1", "here/1", bytes(8), 1.0, requeue_count=20)
    nothing: Any = None
    runtime: Any = SimpleNamespace(
        store=SimpleNamespace(outage=OutageLogger(StoreConfig(url="redis://shop")))
    )
    call = ActiveCall(data, nothing, runtime, nothing, plan_for(settings))

    end = flow.without_store(call, StoreUnavailableError("away"))

    assert isinstance(end, Requeue)
    assert 0.75 * 30 <= end.seconds <= 30
    assert end.unanswered_ids == call.execution_id
