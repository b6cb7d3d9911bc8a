"""Ships an order in three steps. Finished steps are not repeated after a crash or an error.

    celery -A examples.order.tasks worker
    >>> ship.delay(42, amount=999).get()

CELERY_BROKER_URL and CELERY_RESULT_BACKEND set the broker and the result backend.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from celery import Celery

from celery_idempotent import IdempotentTask

app = Celery("order")


@app.task(bind=True, base=IdempotentTask, idempotency_key="order:{order_id}")
def ship(self: IdempotentTask, order_id: int, amount: int) -> dict[str, Any]:
    """Charges, books and mails; after a crash, the next execution continues with the next step."""
    execution = self.idempotency
    payment = execution.step("charge", charge, order_id, amount, key=execution.key)
    parcel = execution.step("book", book, order_id)
    execution.step("mail", mail, order_id, parcel)
    return {"order": order_id, "payment": payment, "parcel": parcel}


def charge(order_id: int, amount: int, key: str) -> str:
    """Charges the customer, and sends `key` to the payment provider as its idempotency key.

    A worker may die after the provider has charged and before the step is stored. The step then
    runs again, and the provider recognizes the key.
    """
    print(f"charging {amount} for order {order_id} under {key}")
    return f"payment-{uuid4().hex}"


def book(order_id: int) -> str:
    """Books a parcel and returns its number."""
    print(f"booking a parcel for order {order_id}")
    return f"parcel-{uuid4().hex}"


def mail(order_id: int, parcel: str) -> None:
    """Mails the customer."""
    print(f"order {order_id} is shipped as {parcel}")
