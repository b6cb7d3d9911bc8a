"""The task that charges an order."""

from __future__ import annotations

from typing import Any

from celery import shared_task
from celery.contrib.django.task import DjangoTask

from celery_idempotent import IdempotentTask


class ShopTask(IdempotentTask, DjangoTask):
    """An idempotent task with Celery's ``delay_on_commit`` (Celery 5.4 and later)."""

    abstract = True


@shared_task(base=ShopTask, idempotency_key="order:{order_id}", idempotency_dedupe_publish=True)
def charge(order_id: int, amount: int) -> dict[str, Any]:
    """Stores a payment for an order.

    The payment and the outcome are committed together (`CELERY_IDEMPOTENCY_TRANSACTION`), so that
    there is one payment even if the worker dies after the commit, or Redis loses the record.
    """
    from examples.django_shop.models import Order, Payment

    payment = Payment.objects.create(order_id=order_id, amount=amount)
    Order.objects.filter(pk=order_id).update(state="paid")
    return {"payment": payment.pk, "amount": payment.amount}
