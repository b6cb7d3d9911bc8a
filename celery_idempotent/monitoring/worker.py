"""What a worker does for those who watch, without a line of user code.

Only signals are connected here. What they need is imported when a worker starts, so a program that
merely publishes pays nothing for it.
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
    import celery_idempotent.monitoring.inspect_commands  # noqa: F401 - its commands are registered by now
    from celery_idempotent.monitoring.bootstep import Idempotency

    instance.app.steps["consumer"].add(Idempotency)


@celeryd_after_setup.connect(weak=False)
def _start_to_watch(instance: Any, **_: Any) -> None:
    """Before the pool is started, whose processes shall have all this."""
    from celery_idempotent.configuration import app_tasks
    from celery_idempotent.monitoring import events

    tasks = app_tasks.tasks(instance.app)
    if tasks:
        shared_counters.start(task.name for task in tasks)
        events.connect()
        _start_metrics(instance.app.conf.get("idempotency_metrics"))


def _start_metrics(setting: Any) -> None:
    if setting is None:
        return
    from celery_idempotent.contrib import prometheus as metrics

    try:
        metrics.start(setting)
    except SettingsError as error:
        # An exception would be swallowed by the signal.
        raise SystemExit(f"Error: {error}") from None
    except ImportError:
        raise SystemExit(
            "Error: idempotency_metrics needs pip install 'celery-idempotent[prometheus]'"
        ) from None


@worker_process_init.connect(weak=False)
def _enter_process(**_: Any) -> None:
    if shared_counters.shared_counters is not None:
        shared_counters.shared_counters.enter_process()


@worker_shutting_down.connect(weak=False)
def _shut_down(**_: Any) -> None:
    if shared_counters.shared_counters is not None:
        shared_counters.shared_counters.shutting_down = True
