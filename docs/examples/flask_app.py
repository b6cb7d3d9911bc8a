"""A service whose clients may repeat a request."""

from types import SimpleNamespace

from celery import Celery
from flask import Flask, request

from celery_idempotent import Idempotency, IdempotentTask
from celery_idempotent.contrib.wsgi import IdempotencyMiddleware, by_header

app = Celery("shop", broker="redis://localhost", backend="redis://localhost")
idem = Idempotency(app, name="payments-api")  # the name of this service

web = Flask(__name__)
web.wsgi_app = IdempotencyMiddleware(
    web.wsgi_app, idem=idem, identity=by_header("authorization"), required=True
)


@app.task(base=IdempotentTask)
def charge(payment, amount):
    return gateway.charge(payment, amount)


@web.post("/payments")
def pay():
    number = idem.current.key.rpartition(":")[2]  # the same for each retry of the request
    charge.apply_async((number, request.get_json()["amount"]), idempotency_key=number)
    return {"payment": number}, 202


gateway = SimpleNamespace(charge=lambda payment, amount: f"receipt of {payment}")
