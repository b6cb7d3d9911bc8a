"""POST /orders/<id>/pay: as often as the browser likes."""

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
    """Charge an order once it is written down that it is to be paid.

    `delay_on_commit`, not `delay`: before the commit a worker would not find the row, and after a
    rollback there would be a message, and a reservation, for an order that nobody has made.
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
