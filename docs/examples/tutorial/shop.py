import os
import time

from celery import Celery

from celery_idempotent import IdempotentTask

app = Celery("shop", broker="redis://localhost", backend="redis://localhost")


@app.task(base=IdempotentTask, bind=True, idempotency_key="order:{order_id}")
def charge(self, order_id, amount):
    print(f"charging {amount} for order {order_id} in process {os.getpid()}")
    if self.idempotency.attempt == 1:
        time.sleep(30)  # the payment provider does not reply
    return f"receipt for order {order_id}"
