"""The worker's side: one way to charge an event, offered by two tasks.

`charge` and `charge_plain` run the same body, and both put their message back when their process
dies. What differs is the base class.
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
#: The event whose first attempt hangs at the provider.
HANGING_EVENT_VARIABLE = "PAYMENTS_HANGING_EVENT"

LEASE_SECONDS = 10.0

# Broker and result backend come from CELERY_BROKER_URL and CELERY_RESULT_BACKEND.
app = Celery("payments")
app.conf.update(
    idempotency_lease=LEASE_SECONDS,
    broker_connection_retry_on_startup=True,
)

if LEDGER_VARIABLE in os.environ:
    Journal(os.environ[LEDGER_VARIABLE]).listen()


@app.task(bind=True, base=IdempotentTask, idempotency_key="event:{event_id}")
def charge(
    self: IdempotentTask, event_id: str, customer: str, amount: int, currency: str
) -> dict[str, Any]:
    """Charge the event; its copies get the same receipt."""
    payment = Payment(event_id, customer, amount, currency)
    return _charge(self, payment, self.idempotency.token, self.idempotency.attempt)


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
def charge_plain(
    self: Task, event_id: str, customer: str, amount: int, currency: str
) -> dict[str, Any]:
    """Charge the event, and again for each of its copies."""
    return _charge(self, Payment(event_id, customer, amount, currency))


def _charge(
    task: Task, payment: Payment, token: int | None = None, attempt: int | None = None
) -> dict[str, Any]:
    ledger = Ledger(os.environ[LEDGER_VARIABLE])
    nth = ledger.announce(payment.event_id, task.request.id)

    hangs = nth == 1 and payment.event_id == os.environ.get(HANGING_EVENT_VARIABLE)
    charge_id = provider.capture(payment, hangs=hangs)

    ledger.append(Charge(charge_id, payment, token, attempt, task.request.id, os.getpid()))
    return {
        "charge": charge_id,
        "event": payment.event_id,
        "amount": payment.amount,
        "currency": payment.currency,
    }
