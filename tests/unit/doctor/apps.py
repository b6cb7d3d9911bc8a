"""Apps whose tasks are checked."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask


def shop(broker_url: str = "redis://localhost:1/0", **settings: Any) -> Celery:
    """Returns an app without tasks."""
    app = Celery("shop", set_as_current=False)
    app.finalized = True  # without the shared tasks of other tests
    app.conf.update(broker_url=broker_url, result_backend="redis://localhost:1/0", **settings)
    return app


def add(app: Celery, function: Any = None, *, name: str = "shop.charge", **options: Any) -> Any:
    """Adds an idempotent task to `app`, and returns it."""

    def charge(order_id: int, amount: int = 0) -> None: ...

    return app.task(
        function or charge, base=IdempotentTask, name=name, lazy=False, shared=False, **options
    )
