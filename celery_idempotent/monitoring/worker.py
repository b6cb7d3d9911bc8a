"""Connects monitoring to the signals of a worker, so that users need no code for it.

What the handlers need is imported when a worker starts, so that programs that only publish do not
load it.
"""

from __future__ import annotations

from typing import Any

from celery.signals import (
    celeryd_after_setup,
    celeryd_init,
    worker_process_init,
    worker_shutting_down,
)

from celery_idempotent import shared_counters
from celery_idempotent.errors import SettingsError


@celeryd_init.connect(weak=False)
def _add_to_worker(instance: Any, **_: Any) -> None:
    import celery_idempotent.monitoring.inspect_commands  # noqa: F401 - registers its commands
    from celery_idempotent.monitoring.bootstep import Idempotency

    instance.app.steps["consumer"].add(Idempotency)


@celeryd_after_setup.connect(weak=False)
def _start_monitoring(instance: Any, **_: Any) -> None:
    """Runs before the pool starts, so that its processes inherit the counters and handlers."""
    from celery_idempotent.configuration import app_tasks
    from celery_idempotent.monitoring import events

    tasks = app_tasks.tasks(instance.app)
    if tasks:
        names = [task.name for task in tasks]
        shared_counters.start(names)
        events.connect()
        _start_metrics(instance.app.conf.get("idempotency_metrics"), names)


def _start_metrics(setting: Any, tasks: list[str]) -> None:
    if setting is None:
        return
    from celery_idempotent.contrib import prometheus

    # The signal would swallow any other exception than SystemExit.
    try:
        prometheus.start(setting, tasks)
    except SettingsError as error:
        raise SystemExit(f"Error: {error}") from None
    except ImportError:
        raise SystemExit(
            "Error: idempotency_metrics needs prometheus_client: "
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
