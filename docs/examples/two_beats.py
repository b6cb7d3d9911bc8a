"""A report that two beats publish, and that is mailed once a morning."""

import time

from celery import Celery

from celery_idempotent import TASK_ID, IdempotentTask

app = Celery("reports", broker="redis://", backend="redis://")


def send_report():
    """Represents a mail server."""


class PeriodicTask(IdempotentTask):
    abstract = True
    idempotency_key = TASK_ID
    period = 3600.0  # seconds

    def apply_async(self, *args, **options):
        number = round(time.time() / self.period)
        options.setdefault("task_id", f"{self.name}-{number}")
        return super().apply_async(*args, **options)


@app.task(base=PeriodicTask, name="reports.mail_once")
def mail_once():
    return send_report()
