"""The start of a worker: its bootsteps, checks and monitoring."""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path
from tempfile import mkstemp
from typing import Any

import billiard
from celery import current_app
from celery import signals as celery_signals

from celery_idempotent.core import shared_counters, worker
from celery_idempotent.errors import SettingsError, StoreUnavailableError

logger = logging.getLogger(__name__)


def add_to(app: Any) -> None:
    """Adds the bootsteps to the worker of `app`."""
    # Imported before the pool forks, so that its processes share the memory of modules that they
    # would otherwise import at first use.
    import celery_idempotent.core.key.difference
    import celery_idempotent.core.store.reference
    import celery_idempotent.core.task.publish.dedupe
    import celery_idempotent.core.task.publish.kept_message
    import celery_idempotent.core.task.publish.put_back
    import celery_idempotent.extensions.rerun
    import celery_idempotent.extensions.steps
    import celery_idempotent.operations.worker.inspect_commands  # noqa: F401 - registers its commands
    from celery_idempotent.operations.worker.bootstep import Idempotency
    from celery_idempotent.redelivery.bootstep import Redelivery
    from celery_idempotent.waking.bootstep import Waking

    app.steps["consumer"].update((Idempotency, Redelivery, Waking))


@celery_signals.celeryd_after_setup.connect(weak=False)
def _on_set_up(instance: Any, **_: Any) -> None:
    """Checks the databases, logs doctor's warnings and errors, and starts counting.

    A worker starts even without Redis, as its messages may come later. This runs before the pool
    starts, so that its processes inherit the counters and handlers.

    Raises:
        SystemExit: if a setting is invalid or a table of outcomes is missing. The signal would
            swallow any other exception.
    """
    from celery_idempotent import sql
    from celery_idempotent.core.configuration import app_tasks, broker
    from celery_idempotent.operations import doctor
    from celery_idempotent.operations.doctor import Severity
    from celery_idempotent.operations.worker import bootstep
    from celery_idempotent.redelivery.broker import shorten_lock

    app = instance.app
    try:
        if broker.redeliver_after(app) is not None:
            shorten_lock(app)
        for database in sql.databases(app_tasks.enabled(app)):
            try:
                database.check()
            except StoreUnavailableError as error:
                logger.error("%s; its tasks are put back until it is available", error)
        for finding in doctor.check_at_start(app):
            level = logging.ERROR if finding.severity == Severity.ERROR else logging.WARNING
            logger.log(level, "A setting or fault weakens idempotency: %s", finding.line)
        if names := [task.name for task in app_tasks.tasks(app)]:
            _check_pool(instance.pool_cls)
            shared_counters.start(names, _file_of_counters(instance))
            bootstep.connect_events()
            _start_metrics(app.conf.get("idempotency_metrics"), names)
    except SettingsError as error:
        raise SystemExit(f"Error: {error}") from None


def _check_pool(pool: Any) -> None:
    if not pool.__module__.startswith("celery."):
        logger.warning(
            "A setting or fault weakens idempotency: the pool %s.%s is not one of Celery's; a body "
            "that it runs outside the task's __call__ is unprotected, and an ERROR",
            pool.__module__,
            pool.__qualname__,
        )


def _file_of_counters(instance: Any) -> int:
    """Returns the descriptor of a new file for the counters; -1 if the pool spawns no processes."""
    is_prefork = instance.pool_cls.__module__ == "celery.concurrency.prefork"
    method = getattr(instance, "pool_start_method", "fork")  # since Celery 5.7
    if not is_prefork or {method, billiard.get_start_method()} == {"fork"}:
        return -1
    descriptor, file_name = mkstemp(prefix="idempotency-counters-")
    os.environ[shared_counters.FILE_VARIABLE] = file_name
    celery_signals.worker_shutdown.connect(lambda **_: Path(file_name).unlink(), weak=False)
    return descriptor


def _join_worker(file_name: str) -> None:
    """Starts counters, events and metrics in a spawned process; a forked one inherits them."""
    from celery_idempotent.core.configuration import app_tasks
    from celery_idempotent.operations.worker import bootstep

    with Path(file_name).open("r+b") as file:
        names = [task.name for task in app_tasks.tasks(current_app)]
        shared_counters.start(names, file.fileno())
    bootstep.connect_events()
    if current_app.conf.get("idempotency_metrics") is not None:
        from prometheus_client import CollectorRegistry

        from celery_idempotent.contrib import prometheus

        prometheus.connect(CollectorRegistry())  # writes to the worker's files


def _start_metrics(setting: Any, tasks: list[str]) -> None:
    if setting is None:
        return
    from celery_idempotent.operations.doctor.tasks import EXPIRED
    from celery_idempotent.operations.worker.inspect_commands import idempotency_leases

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


def enter_process() -> None:
    """Counts in this process of the pool, which has just started."""
    file_name = os.environ.get(shared_counters.FILE_VARIABLE)
    if worker.counters is None and file_name is not None:
        _join_worker(file_name)
    if worker.counters is not None:
        worker.counters.enter_process()


@celery_signals.worker_shutting_down.connect(weak=False)
def _on_shutdown(**_: Any) -> None:
    if worker.counters is not None:
        worker.counters.shutting_down = True
