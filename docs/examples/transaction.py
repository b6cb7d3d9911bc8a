"""A payment and its outcome, which one transaction commits."""

from celery import Celery
from sqlalchemy import create_engine, text

from celery_idempotent import IdempotentTask

app = Celery("shop", broker="redis://", backend="redis://")
engine = create_engine("sqlite:///shop.sqlite")


@app.task(
    base=IdempotentTask,
    bind=True,
    idempotency_key="order:{order_id}",
    idempotency_transaction=engine,  # or its path, "shop.db:engine"
)
def charge(self, order_id, amount):
    self.idempotency.connection.execute(
        text("INSERT INTO payments (order_id, amount) VALUES (:order, :amount)"),
        {"order": order_id, "amount": amount},
    )
    return "paid"
