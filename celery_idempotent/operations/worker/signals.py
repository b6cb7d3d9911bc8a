"""Connects checks and monitoring to a worker's signals, so that users need no code for it.

They are imported when a worker starts; programs that only publish never load them.
"""

from __future__ import annotations

from typing import Any

from celery.signals import celeryd_init, worker_process_init


@celeryd_init.connect(weak=False)
def _on_start(instance: Any, **_: Any) -> None:
    from celery_idempotent.operations.worker import start

    start.add_to(instance.app)


@worker_process_init.connect(weak=False)
def _on_process_start(**_: Any) -> None:
    from celery_idempotent.operations.worker import start

    start.enter_process()
