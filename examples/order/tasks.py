"""Shipping an order takes three steps. Each happens once, wherever the worker dies.

    celery -A examples.order.tasks worker
    >>> ship.delay(42, amount=999).get()

Broker and result backend come from CELERY_BROKER_URL and CELERY_RESULT_BACKEND.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from celery import Celery

from celery_idempotent import IdempotentTask

app = Celery("order")


@app.task(bind=True, base=IdempotentTask, idempotency_key="order:{order_id}")
def ship(self: IdempotentTask, order_id: int, amount: int) -> dict[str, Any]:
    """Charge, book and mail; a second execution goes on where the first one stopped."""
    run = self.idempotency
    payment = run.step("charge", charge, order_id, amount, key=run.key)
    parcel = run.step("book", book, order_id)
    run.step("mail", mail, order_id, parcel)
    return {"order": order_id, "payment": payment, "parcel": parcel}


def charge(order_id: int, amount: int, key: str) -> str:
    """Take the money. A provider that knows `key` does not take it twice either.

    That closes the one gap: a worker that dies after the provider has answered, and before the
    step is written down, leaves the step to be run again.
    """
    print(f"charging {amount} for order {order_id} under {key}")
    return f"payment-{uuid4().hex}"


def book(order_id: int) -> str:
    """Get the number of a parcel."""
    print(f"booking a parcel for order {order_id}")
    return f"parcel-{uuid4().hex}"


def mail(order_id: int, parcel: str) -> None:
    """Tell the customer."""
    print(f"order {order_id} comes as {parcel}")
