"""What follows a task: callbacks, the rest of a chain, a chord's count, errbacks.

Celery sends it after the task's body and before the message is acknowledged. A worker that dies in
between leaves a message that will be redelivered; the record tells the next worker whether the
continuation is out already. Only a task that has one pays the round trip for the note.
"""

from __future__ import annotations

import logging
from typing import Any

from celery.app.task import Context
from celery.canvas import Signature
from celery.signals import task_failure, task_success

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.store import commands

logger = logging.getLogger(__name__)

_AFTER_A_RESULT = ("callbacks", "chain", "chord")
_PARTS = (*_AFTER_A_RESULT, "errbacks")


def drop(request: Context) -> None:
    """Send nothing after this task: it is out already."""
    for part in _PARTS:
        setattr(request, part, None)


def exists(request: Context) -> bool:
    """Whether anything follows the task of `request`."""
    return any(getattr(request, part, None) for part in _PARTS)


def follows_result(request: Context) -> bool:
    """Whether anything is going to be sent with the result of the task."""
    return any(getattr(request, part, None) for part in _AFTER_A_RESULT)


def ignores_result(sig: Signature) -> bool:
    """Whether nobody is told the result of `sig`."""
    ignores = sig.options.get("ignore_result")
    if ignores is None:
        task = sig.app.tasks.get(sig.task)
        ignores = task is not None and task.ignore_result
    return bool(ignores)


@task_success.connect(weak=False)
@task_failure.connect(weak=False)
def note(sender: Any, **_: Any) -> None:
    """The continuation is out: the record shall know, if the outcome in it is this task id's."""
    request = getattr(sender, "request_stack", None) and sender.request_stack.top
    call = getattr(request, "idempotency_call", None)
    if call is None or not call.own_outcome or not call.continues:
        return
    try:
        sender.idempotency_configuration.executor.store.execute(
            commands.mark_continued(call.key, call.task_id)
        )
    except IdempotencyError as error:
        logger.warning("%s: a redelivery may send its continuation again: %s", call.key, error)
