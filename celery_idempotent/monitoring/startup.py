"""What a worker finds out before it takes its first message."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from celery import Celery
from celery.signals import celeryd_after_setup

from celery_idempotent import doctor
from celery_idempotent.configuration.configuration import TaskConfiguration
from celery_idempotent.errors import SettingsError, StoreUnavailableError
from celery_idempotent.settings import Settings
from celery_idempotent.store.record_store import RecordStore

logger = logging.getLogger(__name__)

#: Seconds between two looks whether Redis is back.
LOOK_AGAIN = 1.0

#: The strictest first: it is what counts where the tasks differ.
_MESSAGES = {
    "stop": "this worker stops",
    "wait": "this worker waits for it",
    "go": "this worker starts without it",
}


@celeryd_after_setup.connect(weak=False)
def check_store(instance: Any, **_: Any) -> None:
    """One line for each Redis that does not answer, and what the worker does about it.

    None at all to ask, or none that can be used, ends the worker.
    """
    try:
        policies: dict[RecordStore, set[str]] = defaultdict(set)
        for configured in _gated(instance.app):
            policies[configured.executor.store].add(policy_of(configured.settings))
        for store, wanted in policies.items():
            _await(store, next(policy for policy in _MESSAGES if policy in wanted))
    except SettingsError as error:
        # An exception would be swallowed by the signal.
        raise SystemExit(f"Error: {error}") from None
    for finding in doctor.check_at_start(instance.app):
        logger.warning("Idempotency is weaker than it could be: %s", finding.line)


def policy_of(settings: Settings) -> str:
    """What a task wants of a worker that starts without its store."""
    unprotected = settings.on_store_error == "run"
    return settings.on_store_unavailable_at_start or ("go" if unprotected else "wait")


def _await(store: RecordStore, policy: str) -> None:
    told = False
    while True:
        try:
            store.ping()
        except StoreUnavailableError as error:
            if not told:
                logger.error(
                    "The store of idempotent tasks is away: %s: %s; %s",
                    store.config, error, _MESSAGES[policy],
                )  # fmt: skip
                told = True
            if policy == "stop":
                raise SystemExit(1) from None
            if policy == "go":
                return
            time.sleep(LOOK_AGAIN)
        else:
            if told:
                logger.warning("The store of idempotent tasks is back: %s", store.config)
            return


def _gated(app: Celery) -> Iterator[TaskConfiguration]:
    for task in app.tasks.values():
        configured = getattr(task, "idempotency_configuration", None)
        if configured is not None and configured.settings.enabled:
            yield configured
