"""Checks the databases of ``idempotency_transaction``."""

from __future__ import annotations

from collections.abc import Iterator

from celery import Celery

from celery_idempotent.configuration import app_tasks
from celery_idempotent.doctor.finding import Finding, Severity
from celery_idempotent.errors import IdempotencyError

#: Seconds after which an expired row should be gone, since the cron job runs daily.
PURGE_AFTER = 2 * 86400.0


def check(app: Celery) -> Iterator[Finding]:
    """Yields all findings about the databases."""
    for database in app_tasks.databases(app_tasks.enabled(app)):
        try:
            overdue = database.purge_is_overdue(PURGE_AFTER)
        except IdempotencyError as error:
            yield Finding(
                "database-unreachable", Severity.ERROR, str(database),
                str(error), "the database, its URL and its table",
                "tasks with idempotency_transaction cannot run",
            )  # fmt: skip
            continue
        if overdue:
            yield Finding(
                "purge-overdue", Severity.WARNING, database.engine.name,
                f"outcomes have been expired for more than {PURGE_AFTER / 86400:g} days",
                "a cron job that runs 'celery idempotency purge' every day",
                "the table of outcomes grows without end",
            )  # fmt: skip
