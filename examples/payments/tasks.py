"""The tasks: `charge` is idempotent, `charge_plain` is a plain Celery task.

Both run the same body, and their messages are redelivered if their process dies. Only the base
class differs.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery, Task

from celery_idempotent import IdempotentTask

from . import provider
from .events import Payment
from .journal import Journal
from .ledger import Charge, Ledger

#: The SQLite file that holds ledger and journal.
LEDGER_VARIABLE = "PAYMENTS_LEDGER"
#: Lets every call run, and counts what would have become of it.
SHADOW_VARIABLE = "PAYMENTS_SHADOW"
#: The event whose first call of the provider hangs.
HANGING_EVENT_VARIABLE = "PAYMENTS_HANGING_EVENT"

LEASE_SECONDS = 10.0

# CELERY_BROKER_URL and CELERY_RESULT_BACKEND set the broker and the result backend.
app = Celery("payments")
app.conf.update(
    idempotency_lease=LEASE_SECONDS,
    idempotency_shadow=SHADOW_VARIABLE in os.environ,
    broker_connection_retry_on_startup=True,
)

if LEDGER_VARIABLE in os.environ:
    Journal(os.environ[LEDGER_VARIABLE]).listen()


@app.task(bind=True, base=IdempotentTask, idempotency_key="event:{event_id}")
def charge(
    self: IdempotentTask, event_id: str, customer: str, amount: int, currency: str
) -> dict[str, Any]:
    """Charges an event once; duplicates get the same receipt."""
    payment = Payment(event_id, customer, amount, currency)
    return _charge(self, payment, self.idempotency.token, self.idempotency.attempt)


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
def charge_plain(
    self: Task, event_id: str, customer: str, amount: int, currency: str
) -> dict[str, Any]:
    """Charges an event, and charges it again for each duplicate."""
    return _charge(self, Payment(event_id, customer, amount, currency))


def _charge(
    task: Task, payment: Payment, token: int | None = None, attempt: int | None = None
) -> dict[str, Any]:
    ledger = Ledger(os.environ[LEDGER_VARIABLE])
    attempts = ledger.add_attempt(payment.event_id, task.request.id)

    hangs = attempts == 1 and payment.event_id == os.environ.get(HANGING_EVENT_VARIABLE)
    charge_id = provider.capture(payment, hangs=hangs)

    ledger.append(Charge(charge_id, payment, token, attempt, task.request.id, os.getpid()))
    return {
        "charge": charge_id,
        "event": payment.event_id,
        "amount": payment.amount,
        "currency": payment.currency,
    }
