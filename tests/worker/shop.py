"""The Celery app of the workers under test.

A worker loads this module and reads the app's settings from its environment. A test imports the
same tasks; they belong to the app of the :class:`~tests.worker.harness.Shop` that the test has
opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.backends.redis import RedisBackend
from celery.signals import task_failure, task_success, worker_init
from celery.utils.dispatch import Signal

from celery_idempotent import IdempotentTask, signals
from celery_idempotent.core.task.publish import put_back
from tests.servers.program import die_with_parent
from tests.worker import canvas_tasks, tasks  # noqa: F401 (registers them)
from tests.worker.ledger import Ledger

SETTINGS_VARIABLE = "SHOP_SETTINGS"

#: All but those of operators, and one that each begin has.
SIGNALS = [
    signal
    for name, signal in vars(signals).items()
    if isinstance(signal, Signal) and name not in ("begin_replied", "forgotten", "rerun")
]


def make_app(settings: Mapping[str, Any]) -> Celery:
    """Returns the app; its tasks are shared, so every app has them."""
    app = Celery("shop", set_as_current=False)
    app.conf.update(settings)
    put_back.CONFIRM_TIMEOUT = settings.get("shop_confirm_timeout", put_back.CONFIRM_TIMEOUT)
    return app


_settings = os.environ.get(SETTINGS_VARIABLE)
app = make_app(json.loads(_settings)) if _settings else None


def _is_from_shop(sender: Any) -> bool:
    """Returns whether `sender` is a task of a shop; a test's own process has other callers, too."""
    return isinstance(sender, IdempotentTask) and "shop_ledger" in sender.app.conf


def _record_signal(signal: Any, sender: Any, **details: Any) -> None:
    if _is_from_shop(sender):
        # All decisions in shadow have one signal.
        name = details.get("decision") or signal.name.removeprefix("idempotency_")
        Ledger.of(sender.app).record_signal(name, sender.name, details)


for _signal in SIGNALS:
    _signal.connect(_record_signal, weak=False)


@signals.completed.connect
@signals.failed.connect
def _die_before_the_continuation(sender: Any, task_id: str, **_: Any) -> None:
    if _is_from_shop(sender):
        Ledger.of(sender.app).wait_for_release(f"continuation of {task_id}")
        Ledger.of(sender.app).die_if_requested("before", task_id)


def _die_before_the_count(
    self: RedisBackend, request: Any, *args: Any, count: Any = RedisBackend.on_chord_part_return
) -> None:
    """Celery counts a task in its chord after it has stored the result."""
    if "shop_ledger" in self.app.conf:
        Ledger.of(self.app).die_if_requested("stored", request.id)
    count(self, request, *args)


RedisBackend.on_chord_part_return = _die_before_the_count


# The library marks the continuation as sent in a receiver of the same signals, which it has
# connected earlier.
@task_success.connect
@task_failure.connect
def _die_after_the_continuation(sender: Any, **_: Any) -> None:
    if sender.name.startswith("shop.") and "shop_ledger" in sender.app.conf:
        Ledger.of(sender.app).die_if_requested("after", sender.request.id)


worker_init.connect(die_with_parent)
