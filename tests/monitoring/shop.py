"""An app with idempotent tasks, also for ``celery -A tests.monitoring.shop``."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_idempotent import TASK_ID, IdempotentTask

URL_VARIABLE = "MONITORING_SHOP_URL"


class DeclinedError(Exception):
    """The card is declined."""


def make_app(url: str) -> Celery:
    """Returns the app with its broker, results and records at `url`; its tasks run eagerly."""
    app = Celery("shop", broker=url, backend=url, set_as_current=False)
    app.finalized = True  # without the shared tasks of other tests
    app.conf.update(task_always_eager=True, broker_connection_retry_on_startup=True)

    def task(function: Any, name: str, **options: Any) -> Any:
        options |= {"base": IdempotentTask, "name": name, "shared": False, "lazy": False}
        return app.task(function, **options)

    def charge(order_id: int, amount: int, currency: str = "EUR") -> dict[str, Any]:
        if amount == 13:
            raise DeclinedError(f"order {order_id}")
        return {"order": order_id, "amount": amount}

    def pack(order_id: int, size: int = 1) -> str:
        return "x" * size

    def tidy() -> None: ...

    errors = (DeclinedError,)
    task(
        charge, "shop.charge", idempotency_key="order:{order_id}", idempotency_replay_errors=errors
    )
    task(pack, "shop.pack", idempotency_max_result_size=10_000, idempotency_key_prefix="own?*")
    task(tidy, "shop.tidy", idempotency_key=TASK_ID)
    return app


app = make_app(os.environ[URL_VARIABLE]) if URL_VARIABLE in os.environ else None
