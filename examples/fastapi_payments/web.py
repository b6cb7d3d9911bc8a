"""POST /payments with an Idempotency-Key starts a charge; clients may retry it at any time.

    uvicorn examples.fastapi_payments.web:api
    celery -A examples.fastapi_payments.tasks worker
    curl -i localhost:8000/payments -H 'Authorization: Bearer alice' \
        -H 'Idempotency-Key: 8e03978e' -H 'Content-Type: application/json' \
        -d '{"account": "A-1", "amount": 999}'

The middleware runs one request for each key and replays its response to retries. If this process
dies after it has published the task and before it has stored the response, a retry runs the request
again once the lease has expired. It publishes the task with the same key, so the worker charges
once.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field

from celery_idempotent import Idempotency
from celery_idempotent.contrib.asgi import IdempotencyMiddleware, by_header
from examples.fastapi_payments.tasks import app, charge

idem = Idempotency(app, name="payments-api", lease=10)
api = FastAPI()
api.add_middleware(
    IdempotencyMiddleware,
    idem=idem,
    identity=by_header("authorization"),
    required=True,
)


class Payment(BaseModel):
    """The body of a request."""

    account: str
    amount: int = Field(gt=0)


@api.post("/payments", status_code=202)
async def pay(payment: Payment) -> dict[str, Any]:
    """Publishes the charge; the payment's number is derived from the key, so retries share it."""
    number = idem.current.key.rpartition(":")[2]
    charge.apply_async((number, payment.account, payment.amount), idempotency_key=number)
    return {"payment": number, "status": "accepted"}
