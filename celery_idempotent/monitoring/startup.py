"""Checks that a worker runs before it takes its first message."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import Any

from celery.signals import celeryd_after_setup

from celery_idempotent.configuration import app_tasks
from celery_idempotent.errors import SettingsError, StoreUnavailableError
from celery_idempotent.settings import Settings
from celery_idempotent.sql.database import Database
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.run_sync import run_sync

logger = logging.getLogger(__name__)

#: Seconds between two attempts to reach Redis.
POLL_INTERVAL = 1.0

#: What follows from each policy. The strictest is first: it applies where tasks differ.
_MESSAGES = {
    "exit": "this worker exits",
    "wait": "this worker waits for it",
    "continue": "this worker starts without it",
}


@celeryd_after_setup.connect(weak=False)
def check_stores(instance: Any, **_: Any) -> None:
    """Checks that each store replies, and logs the findings of `doctor` that are warnings.

    Raises:
        SystemExit: if the settings name no usable Redis, or if one is unavailable and a task's
            policy is to exit. The signal would swallow any other exception.
    """
    try:
        policies: dict[RecordStore, set[str]] = defaultdict(set)
        databases: set[Database] = set()
        for task in app_tasks.enabled(instance.app):
            configuration = task.idempotency_configuration
            policies[configuration.executor.store].add(policy_of(configuration.settings))
            if configuration.settings.transaction is not None:
                databases.add(configuration.settings.transaction)
        for database in databases:
            _check_database(database)
        for store, wanted in policies.items():
            _await_store(store, next(policy for policy in _MESSAGES if policy in wanted))
    except SettingsError as error:
        raise SystemExit(f"Error: {error}") from None
    # Imported here, since programs that only publish do without it.
    from celery_idempotent import doctor

    for finding in doctor.check_at_start(instance.app):
        logger.warning("The configuration weakens idempotency: %s", finding.line)


def policy_of(settings: Settings) -> str:
    """Returns what a worker does if a task's store is unavailable when it starts."""
    default = "continue" if settings.on_store_error == "run" else "wait"
    return settings.on_store_unavailable_at_start or default


def _await_store(store: RecordStore, policy: str) -> None:
    logged = False
    while True:
        try:
            run_sync(store.ping())
        except StoreUnavailableError as error:
            if not logged:
                logger.error(
                    "The record store %s is unavailable: %s; %s",
                    store.config, error, _MESSAGES[policy],
                )  # fmt: skip
                logged = True
            if policy == "exit":
                raise SystemExit(1) from None
            if policy == "continue":
                return
            time.sleep(POLL_INTERVAL)
        else:
            if logged:
                logger.warning("The record store %s is available again", store.config)
            return


def _check_database(database: Database) -> None:
    """Checks the table of outcomes; while the database is unavailable, its tasks are requeued.

    Raises:
        SettingsError: if the table is missing.
    """
    try:
        database.check()
    except StoreUnavailableError as error:
        logger.error("%s; its tasks are requeued until it is available", error)
