"""Connects checks and monitoring to a worker's signals, so that users need no code for it.

The handlers import their dependencies when a worker starts; programs that only publish never load
them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from celery.signals import (
    celeryd_after_setup,
    celeryd_init,
    worker_process_init,
    worker_shutting_down,
)

from celery_idempotent import shared_counters
from celery_idempotent.errors import SettingsError, StoreUnavailableError
from celery_idempotent.store.run_sync import run_sync

if TYPE_CHECKING:
    from celery_idempotent.configuration.app_tasks import IdempotentTaskLike

logger = logging.getLogger(__name__)


@celeryd_init.connect(weak=False)
def _add_to_worker(instance: Any, **_: Any) -> None:
    import celery_idempotent.monitoring.inspect_commands  # noqa: F401 - registers its commands
    from celery_idempotent.monitoring.bootstep import Idempotency
    from celery_idempotent.redelivery.bootstep import Redelivery

    instance.app.steps["consumer"].update((Idempotency, Redelivery))


@celeryd_after_setup.connect(weak=False)
def _on_set_up(instance: Any, **_: Any) -> None:
    """Checks stores and databases, logs `doctor` warnings and errors, and starts counting.

    A worker starts even without Redis: idempotency_on_store_error applies to its messages. This
    runs before the pool starts, so that its processes inherit the counters and handlers.

    Raises:
        SystemExit: if a setting is invalid or a table of outcomes is missing. The signal would
            swallow any other exception.
    """
    from celery_idempotent import doctor
    from celery_idempotent.configuration import app_tasks, broker
    from celery_idempotent.monitoring import events

    app = instance.app
    try:
        broker.redeliver_after(app)
        _check_stores(app_tasks.enabled(app))
        for finding in doctor.check_at_start(app):
            logger.warning("The configuration weakens idempotency: %s", finding.line)
        if names := [task.name for task in app_tasks.tasks(app)]:
            shared_counters.start(names)
            events.connect()
            _start_metrics(app.conf.get("idempotency_metrics"), names)
    except SettingsError as error:
        raise SystemExit(f"Error: {error}") from None


def _check_stores(tasks: Iterable[IdempotentTaskLike]) -> None:
    """Checks that stores reply and databases have the table of outcomes.

    Raises:
        SettingsError: if there is no such table.
    """
    configurations = [task.idempotency_configuration for task in tasks]
    for database in {configuration.settings.transaction for configuration in configurations}:
        try:
            if database is not None:
                database.check()
        except StoreUnavailableError as error:
            logger.error("%s; its tasks are requeued until it is available", error)
    for store in dict.fromkeys(configuration.executor.store for configuration in configurations):
        try:
            run_sync(store.ping())
        except StoreUnavailableError as error:
            logger.error(
                "The record store %s is unavailable: %s; idempotency_on_store_error applies to "
                "every message until it replies",
                store.config,
                error,
            )


def _start_metrics(setting: Any, tasks: list[str]) -> None:
    if setting is None:
        return
    from celery_idempotent.doctor.tasks import EXPIRED
    from celery_idempotent.monitoring.inspect_commands import idempotency_leases

    def expired_leases() -> Counter[str] | None:
        leases = idempotency_leases(None)
        if not isinstance(leases, list):
            return None  # Redis does not reply
        return Counter(lease["task"] for lease in leases if lease["heartbeat"] in EXPIRED)

    try:
        from celery_idempotent.contrib import prometheus

        prometheus.start(setting, tasks, expired_leases)
    except ImportError:
        raise SettingsError(
            "idempotency_metrics needs prometheus_client: "
            "pip install 'celery-idempotent[prometheus]'"
        ) from None


@worker_process_init.connect(weak=False)
def _on_process_start(**_: Any) -> None:
    if shared_counters.current is not None:
        shared_counters.current.enter_process()


@worker_shutting_down.connect(weak=False)
def _on_shutdown(**_: Any) -> None:
    if shared_counters.current is not None:
        shared_counters.current.shutting_down = True
