"""A service whose clients may repeat a request; examples/fastapi_payments is a larger one."""

from types import SimpleNamespace

from celery import Celery
from fastapi import FastAPI
from pydantic import BaseModel

from celery_idempotent import Idempotency, IdempotentTask
from celery_idempotent.contrib.asgi import IdempotencyMiddleware, by_header

app = Celery("shop", broker="redis://localhost", backend="redis://localhost")
idem = Idempotency(app, name="payments-api")  # the name of this service

api = FastAPI()
api.add_middleware(
    IdempotencyMiddleware, idem=idem, identity=by_header("authorization"), required=True
)


@app.task(base=IdempotentTask)
def charge(payment, amount):
    return gateway.charge(payment, amount)


class Payment(BaseModel):
    amount: int


@api.post("/payments", status_code=202)
async def pay(payment: Payment):
    number = idem.current.key.rpartition(":")[2]  # the same for each retry of the request
    charge.apply_async((number, payment.amount), idempotency_key=number)
    return {"payment": number}


gateway = SimpleNamespace(charge=lambda payment, amount: f"receipt of {payment}")
