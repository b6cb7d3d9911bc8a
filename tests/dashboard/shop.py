"""The app behind the dashboard in the browser, also for ``celery -A tests.dashboard.shop``.

Its tasks wait while their order is held.
"""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery
from celery.signals import worker_init
from redis import Redis

from celery_idempotent import IdempotentTask
from tests.servers.program import die_with_parent
from tests.waiting import POLL_INTERVAL

URL_VARIABLE = "DASHBOARD_SHOP_URL"
#: Longest wait for an order, in seconds.
MAX_HOLD = 120.0
#: Seconds of the lease of `renew`.
SHORT_LEASE = 2.0


class CardDeclinedError(Exception):
    """The card is declined."""


def make_app(url: str) -> Celery:
    """Returns the app with its broker, results, records and held orders at `url`."""
    app = Celery("shop", broker=url, backend=url, set_as_current=False)
    app.finalized = True  # without the shared tasks of other tests
    app.conf.update(broker_connection_retry_on_startup=True, worker_prefetch_multiplier=1)
    redis = Redis.from_url(url)

    def wait_while_held(order: str) -> None:
        end = time.monotonic() + MAX_HOLD
        while redis.exists(f"held:{order}") and time.monotonic() < end:
            time.sleep(POLL_INTERVAL)

    def charge(order: str, amount: int) -> dict[str, Any]:
        wait_while_held(order)
        if amount == 13:
            raise CardDeclinedError(f"order {order}: the card is declined")
        return {"order": order, "paid": {"amount": amount, "currency": "EUR"}, "lines": [1, 2]}

    def ship(self: Any, order: str) -> str:
        for part in ("reserve", "pack", "hand over"):
            self.idempotency.step(part, lambda: None)
        wait_while_held(order)
        return f"parcel of {order}"

    def renew(subscription: str) -> None:
        wait_while_held(subscription)

    def task(function: Any, name: str, **options: Any) -> None:
        app.task(function, base=IdempotentTask, name=name, shared=False, lazy=False, **options)

    named = {"idempotency_key": "{order}", "idempotency_label": "order {order}"}
    task(charge, "shop.charge", idempotency_replay_errors=(CardDeclinedError,), **named)
    task(ship, "shop.ship", bind=True, **named)
    task(renew, "shop.renew", idempotency_lease=SHORT_LEASE)
    return app


app = make_app(os.environ[URL_VARIABLE]) if URL_VARIABLE in os.environ else None

worker_init.connect(die_with_parent)
