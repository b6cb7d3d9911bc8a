"""Canvases: the continuation of a task, and a canvas that replaces a task.

Celery sends the continuation (callbacks, the rest of a chain, a chord's count) after the body and
before it acknowledges the message. If the worker dies in between, the message is redelivered, and
the record shows whether the continuation was sent before. Only a task with a continuation pays the
round trip for that mark.

A task may replace itself with a canvas in which it occurs again. Of the calls with its key in that
canvas, the one with its id continues under the key, and its outcome becomes the key's. Each of the
others gets a key of its own, made of the key and its task id: its duplicates are recognized, and it
does not wait for the key that it is a part of. A header of every message of the canvas names the
replaced keys, because the key of a call may depend on results that do not exist yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import current_task
from celery.app.task import Context
from celery.exceptions import Ignore
from celery.signals import task_postrun, task_success
from celery.utils import uuid

from celery_idempotent.core.key import Key
from celery_idempotent.core.task.message.message_headers import id_text

#: For each replaced key, by its name: ``fingerprint.id`` of the task that had it.
REPLACED_HEADER = "idempotency_replaced"
#: More than the retries of any message.
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
    call = getattr(request, "idempotency_call", None)
    if call is not None:
        call.active.mark_continuation_sent()


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


def with_replaced_keys(task_id: str, headers: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Returns the headers of a publish by a plain task that is itself a part of a replacement."""
    request = getattr(current_task, "request_stack", None) and current_task.request_stack.top
    is_same = request is not None and id_text(request.id) == task_id
    if is_same and (replaced := replaced_keys(request)):
        return {REPLACED_HEADER: replaced, **(headers or {})}
    return headers


def key_in_canvas(key: Key, request: Context, task_id: str) -> Key:
    """Returns the key of a call for which the rule derives `key`, in a replacement or not."""
    value = replaced_keys(request).get(str(key))
    if not isinstance(value, str):
        return key
    text, _, successor_id = value.partition(".")
    fingerprint = bytes.fromhex(text)
    if successor_id == task_id:
        # Its arguments may differ from those of the first call with the key.
        return key.with_fingerprint(fingerprint)
    # In an eager run every link of a chain has the same id, and no call has duplicates.
    return key.part(uuid() if request.is_eager else task_id)


def replaced_keys(request: Context) -> Mapping[str, Any]:
    """Returns the replaced keys; none outside a replacement, since tasks may forward headers."""
    if not (request.replaced_task_nesting or request.is_eager):
        return {}
    replaced = (request.headers or {}).get(REPLACED_HEADER)
    return replaced if isinstance(replaced, Mapping) else {}
