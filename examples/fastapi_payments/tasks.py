"""The task that charges a payment.

CELERY_BROKER_URL and CELERY_RESULT_BACKEND set the broker and the result backend.
"""

from __future__ import annotations

from celery import Celery

from celery_idempotent import IdempotentTask

app = Celery("payments")


@app.task(base=IdempotentTask)
def charge(payment: str, account: str, amount: int) -> str:
    """Charges a payment once, however often the web process publishes it."""
    print(f"charging {amount} to {account} for payment {payment}", flush=True)
    return f"receipt of {payment}"
