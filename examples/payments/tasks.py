"""The tasks: `charge` is idempotent, `charge_plain` is a plain Celery task.

Both run the same body, and their messages are redelivered if their process dies. They differ in the
base class, and in the code that begins the transaction of the charge.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery, Task
from sqlalchemy import Connection

from celery_idempotent import IdempotentTask

from . import database, provider
from .events import Payment
from .journal import Journal
from .ledger import Charge, Ledger

#: The SQLite file that holds the journal.
JOURNAL_VARIABLE = "PAYMENTS_JOURNAL"
#: Lets every call run, and counts the decisions that would have applied.
SHADOW_VARIABLE = "PAYMENTS_SHADOW"
#: The event whose first call of the provider hangs.
HANGING_EVENT_VARIABLE = "PAYMENTS_HANGING_EVENT"
#: The event whose first execution hangs when it has committed its charge.
COMMITTED_EVENT_VARIABLE = "PAYMENTS_COMMITTED_EVENT"

LEASE_SECONDS = 10.0

# CELERY_BROKER_URL and CELERY_RESULT_BACKEND set the broker and the result backend.
app = Celery("payments")
app.conf.update(
    idempotency_lease=LEASE_SECONDS,
    broker_connection_retry_on_startup=True,
    result_backend_always_retry=True,
)


def configure(*, shadow: bool) -> None:
    """Puts the charge and its outcome in one transaction; a task in shadow has no outcome."""
    app.conf.update(
        idempotency_shadow=shadow, idempotency_transaction=None if shadow else database.engine
    )


configure(shadow=SHADOW_VARIABLE in os.environ)
if JOURNAL_VARIABLE in os.environ:
    Journal(os.environ[JOURNAL_VARIABLE]).listen()


@app.task(bind=True, base=IdempotentTask, idempotency_key="event:{event_id}")
def charge(
    self: IdempotentTask, event_id: str, customer: str, amount: int, currency: str
) -> dict[str, Any]:
    """Charges an event once; duplicates get the same receipt."""
    payment, execution = Payment(event_id, customer, amount, currency), self.idempotency
    if app.conf.idempotency_shadow:
        with database.engine.begin() as connection:
            return _charge(self, payment, connection, execution.token, execution.attempt)
    return _charge(self, payment, execution.connection, execution.token, execution.attempt)


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
def charge_plain(
    self: Task, event_id: str, customer: str, amount: int, currency: str
) -> dict[str, Any]:
    """Charges an event, and charges it again for each duplicate."""
    with database.engine.begin() as connection:
        return _charge(self, Payment(event_id, customer, amount, currency), connection)


def _charge(
    task: Task,
    payment: Payment,
    connection: Connection,
    token: int | None = None,
    attempt: int | None = None,
) -> dict[str, Any]:
    event_id, task_id = payment.event_id, task.request.id
    attempts = Journal(os.environ[JOURNAL_VARIABLE]).add_attempt(event_id, task_id)

    hangs = attempts == 1 and event_id == os.environ.get(HANGING_EVENT_VARIABLE)
    charge_id = provider.capture(payment, hangs=hangs)

    charges = Ledger.append(
        connection, Charge(charge_id, payment, token, attempt, task_id, os.getpid())
    )
    if charges == 1 and event_id == os.environ.get(COMMITTED_EVENT_VARIABLE):
        database.hang_after_commit(connection)
    return {
        "charge": charge_id,
        "event": payment.event_id,
        "amount": payment.amount,
        "currency": payment.currency,
    }
