"""Mails a report every morning; a copy of a finished message does not run.

    celery -A examples.periodic.tasks worker --beat

Every message that beat sends has the same arguments, and each message should run. Only copies of
one message are duplicates: a broker may deliver a message twice, for instance after a lost
connection. The key rule TASK_ID stands for exactly that.

CELERY_BROKER_URL and CELERY_RESULT_BACKEND set the broker and the result backend.
"""

from __future__ import annotations

from celery import Celery
from celery.schedules import crontab

from celery_idempotent import TASK_ID, IdempotentTask

app = Celery("reports")
app.conf.beat_schedule = {
    "every morning": {"task": "reports.mail", "schedule": crontab(hour=7, minute=0)},
}


@app.task(base=IdempotentTask, name="reports.mail", idempotency_key=TASK_ID)
def mail_report() -> str:
    """Computes and mails the report."""
    report = "42 orders since yesterday"
    send(report)
    return report


def send(report: str) -> None:
    """Represents the mail server."""
    print(f"mailed: {report}")
