"""What the web process leaves to Celery.

Broker and result backend come from CELERY_BROKER_URL and CELERY_RESULT_BACKEND.
"""

from __future__ import annotations

from celery import Celery

from celery_idempotent import IdempotentTask

app = Celery("payments")


@app.task(base=IdempotentTask)
def charge(payment: str, account: str, amount: int) -> str:
    """Take the money, once for each payment, however often the web process says so."""
    print(f"charging {amount} to {account} for payment {payment}", flush=True)
    return f"receipt of {payment}"
