"""What a worker finds out before it takes its first message."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from celery import Celery
from celery.signals import celeryd_after_setup

from celery_idempotent.entry.configuration import ConfigurationError, TaskConfiguration
from celery_idempotent.errors import StoreUnavailableError

logger = logging.getLogger(__name__)


@celeryd_after_setup.connect(weak=False)
def check_store(instance: Any, **_: Any) -> None:
    """One line for each Redis that does not answer; none at all to ask ends the worker.

    An unreachable Redis does not: each message will fare by ``idempotency_on_store_error``, and
    Redis may be back before the first one comes.
    """
    try:
        stores = {configured.gate.store for configured in _gated(instance.app)}
    except ConfigurationError as error:
        # An exception would be swallowed by the signal.
        raise SystemExit(f"Error: {error}") from None
    for store in stores:
        try:
            store.ping()
        except StoreUnavailableError as error:
            logger.error("The store of idempotent tasks is away: %s: %s", store.place, error)


def _gated(app: Celery) -> Iterator[TaskConfiguration]:
    for task in app.tasks.values():
        configured = getattr(task, "idempotency_configuration", None)
        if configured is not None and configured.settings.enabled:
            yield configured
