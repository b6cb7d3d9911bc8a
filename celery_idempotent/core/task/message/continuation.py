"""The continuation of a task: callbacks, the rest of a chain, a chord's count.

Celery sends it after the body and before it acknowledges the message. If the worker dies in
between, the message is redelivered, and the record shows whether the continuation was sent before.
Until it is marked as sent, or the time for that is over, no redelivery sends it; the parent process
ends that time if the process dies. Only a task with a continuation pays the round trip for that
mark.
"""

from __future__ import annotations

from typing import Any

from celery.app.task import Context
from celery.exceptions import Ignore
from celery.signals import task_postrun, task_success

from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.errors import IdempotencyError

#: The distance between the generations of two levels of replacement: more than any number of
#: retries.
GENERATIONS = 10**9


def has_continuation(request: Context) -> bool:
    """Returns whether the task of `request` has a continuation."""
    return bool(request.callbacks or request.chain or request.chord)


def drop_continuation(request: Context) -> None:
    """Keeps Celery from sending the continuation of this task, which was sent before."""
    request.callbacks = request.chain = request.chord = request.errbacks = None


@task_success.connect(weak=False)
def mark_continuation_sent(sender: Any, **_: Any) -> None:
    """Marks in the record that the continuation of a value was sent."""
    request = getattr(sender, "request_stack", None) and sender.request_stack.top
    host = getattr(request, "idempotency_host", None)
    if host is None or not (token := host.call.continuation_token):
        return
    try:
        run_sync(host.call.runtime.execute(commands.mark_sent(host.call.key, token)))
    except IdempotencyError as error:
        report(table.MAY_CONTINUE_AGAIN, host.call, error=error)


@task_postrun.connect(weak=False)
def free_frames(retval: Any = None, **_: Any) -> None:
    """Frees the frames of an Ignore: Celery keeps the error in a cycle until a full collection."""
    if isinstance(retval, Ignore):
        retval.__traceback__ = None


def generation_of(request: Context) -> int:
    """Returns the number of a message among those of its task id.

    A retry adds one to ``retries``. A task that replaces itself starts again, one level deeper.
    """
    return int(request.replaced_task_nesting or 0) * GENERATIONS + int(request.retries or 0)
