"""Checks that a worker runs before it takes its first message."""

from __future__ import annotations

import logging
from typing import Any

from celery.signals import celeryd_after_setup

from celery_idempotent.configuration import app_tasks
from celery_idempotent.errors import SettingsError, StoreUnavailableError
from celery_idempotent.sql.database import Database
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.run_sync import run_sync

logger = logging.getLogger(__name__)


@celeryd_after_setup.connect(weak=False)
def check_stores(instance: Any, **_: Any) -> None:
    """Checks that each store replies, and logs the findings of `doctor` that are warnings.

    A worker starts without Redis, too: idempotency_on_store_error applies to its messages.

    Raises:
        SystemExit: if the settings name no usable Redis, or a table of outcomes is missing. The
            signal would swallow any other exception.
    """
    try:
        tasks = app_tasks.enabled(instance.app)
        databases = {task.idempotency_configuration.settings.transaction for task in tasks} - {None}
        for database in databases:
            _check_database(database)
        for store in app_tasks.stores(tasks):
            _check_store(store)
    except SettingsError as error:
        raise SystemExit(f"Error: {error}") from None
    # Imported here, since programs that only publish do without it.
    from celery_idempotent import doctor

    for finding in doctor.check_at_start(instance.app):
        logger.warning("The configuration weakens idempotency: %s", finding.line)


def _check_store(store: RecordStore) -> None:
    try:
        run_sync(store.ping())
    except StoreUnavailableError as error:
        logger.error(
            "The record store %s is unavailable: %s; idempotency_on_store_error applies to every "
            "message until it replies",
            store.config,
            error,
        )


def _check_database(database: Database) -> None:
    """Checks the table of outcomes; while the database is unavailable, its tasks are requeued.

    Raises:
        SettingsError: if the table is missing.
    """
    try:
        database.check()
    except StoreUnavailableError as error:
        logger.error("%s; its tasks are requeued until it is available", error)
