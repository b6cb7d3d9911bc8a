"""POST /payments with an Idempotency-Key starts a charge, and may be sent again at any time.

    uvicorn examples.fastapi_payments.web:api
    celery -A examples.fastapi_payments.tasks worker
    curl -i localhost:8000/payments -H 'Idempotency-Key: 8e03978e' \
        -H 'Content-Type: application/json' -d '{"account": "A-1", "amount": 999}'

The middleware lets one request through for each key and keeps its answer. If this process dies
between starting the task and keeping the answer, the client's next try comes through again when
the lease has ended, and starts the task again, under the same key: the worker charges once.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field

from celery_idempotent import Idempotency
from celery_idempotent.contrib.asgi import IdempotencyMiddleware
from examples.fastapi_payments.tasks import app, charge

idem = Idempotency(app, name="payments", lease=10)
api = FastAPI()
api.add_middleware(IdempotencyMiddleware, idem=idem)


class Payment(BaseModel):
    """What is to be paid."""

    account: str
    amount: int = Field(gt=0)


@api.post("/payments", status_code=202)
async def pay(payment: Payment) -> dict[str, Any]:
    """Start the charge; its number is made of the key, so every try gives the same one."""
    number = idem.current.key.rpartition(":")[2]
    charge.apply_async((number, payment.account, payment.amount), idempotency_key=number)
    return {"payment": number, "status": "accepted"}
