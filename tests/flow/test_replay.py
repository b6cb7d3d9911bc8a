"""Replays of the outcome of a task that has replaced another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.payload.codec import DELEGATED
from celery_idempotent.record import layout
from celery_idempotent.record.payload import Payload
from celery_idempotent.store import commands
from tests.flow.deliveries import begin_elsewhere

Make = Callable[..., IdempotentTask]


def complete_by_replacement(task: IdempotentTask, order: str) -> None:
    """Stores what a task stores that has replaced itself by the task "another"."""
    configuration = task.idempotency_configuration
    key = task.idempotency_key_of(order)
    token = layout.begun(begin_elsewhere(task, order).raw).token
    payload = Payload(DELEGATED, layout.write_replacement(1, "another", b""))
    assert configuration.execute(commands.complete(key, token, payload, 60_000)).case == "ok"


@pytest.mark.parametrize("error", [ValueError("no card"), StopIteration("no card")])
def test_an_error_of_the_replacement_is_raised_unchanged(
    app: Celery, task: Make, error: Exception
) -> None:
    def body(self: IdempotentTask, order: str) -> Any:
        raise AssertionError

    app.conf.task_store_eager_result = True
    charge = task(body, replay_errors=(type(error),))
    complete_by_replacement(charge, "1")
    app.backend.mark_as_failure("another", error)

    with pytest.raises(type(error)) as caught:
        charge.delay("1")
    assert caught.value.args == ("no card",)
