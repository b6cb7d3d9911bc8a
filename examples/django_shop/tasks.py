"""The task that charges an order."""

from __future__ import annotations

from typing import Any

from celery import shared_task
from celery.contrib.django.task import DjangoTask
from django.db import transaction

from celery_idempotent import IdempotentTask


class ShopTask(IdempotentTask, DjangoTask):
    """An idempotent task with Celery's ``delay_on_commit`` (Celery 5.4 and later)."""

    abstract = True


@shared_task(
    bind=True,
    base=ShopTask,
    idempotency_key="order:{order_id}",
    idempotency_dedupe_publish=True,
)
def charge(self: Any, order_id: int, amount: int) -> dict[str, Any]:
    """Stores a payment for an order.

    The transaction is committed before the outcome is stored. If a worker dies in between, the next
    execution finds the payment by its key.
    """
    from examples.django_shop.models import Order, Payment

    with transaction.atomic():
        payment, _ = Payment.objects.get_or_create(
            key=self.idempotency.key, defaults={"order_id": order_id, "amount": amount}
        )
        Order.objects.filter(pk=order_id).update(state="paid")
    return {"payment": payment.pk, "amount": payment.amount}
