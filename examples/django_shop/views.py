"""POST /orders/<id>/pay charges an order, once for any number of requests."""

from __future__ import annotations

from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from examples.django_shop.models import Order
from examples.django_shop.tasks import charge


@csrf_exempt
@require_POST
def pay(request: HttpRequest, order_id: int) -> HttpResponse:
    """Marks an order as being paid, and publishes its charge when the transaction commits.

    `delay` would publish the charge before the commit: a worker might not find the row yet, and
    after a rollback the message and its reservation would remain.
    """
    with transaction.atomic():
        order = get_object_or_404(Order.objects.select_for_update(), pk=order_id)
        if order.state == "new":
            order.state = "paying"
            order.save()
        charge.delay_on_commit(order.pk, order.amount)
    record = charge.idempotency_record(order.pk, order.amount)
    state = record.state.value if record is not None else "gone"
    return JsonResponse({"order": order.pk, "charge": state}, status=202)
