"""Canvases that replace a task: which of their calls continue under its key.

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
from celery.utils import uuid

from celery_idempotent.core.key import Key
from celery_idempotent.core.task.message.message_headers import id_text

#: A mapping. For each replaced key: ``fingerprint.id``, the fingerprint and task id of its call.
REPLACED_HEADER = "idempotency_replaced"


def with_replaced_keys(task_id: str, headers: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Returns `headers` for a publish, with those of the running task if that publishes itself.

    A message with the id of the running task, such as the one by which a plain task replaces
    itself, is the same part of a canvas that has replaced a task, and so needs the replaced keys.
    """
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
        # With the fingerprint of the first call, because this one's arguments may differ.
        return key.with_fingerprint(fingerprint)
    # In an eager run, every link of a chain has the same task id, so each gets a random key: no
    # call has duplicates there.
    return key.part(uuid() if request.is_eager else task_id)


def replaced_keys(request: Context) -> Mapping[str, Any]:
    """Returns the replaced keys; none outside a replacement, since tasks may forward headers."""
    if not (request.replaced_task_nesting or request.is_eager):
        return {}
    replaced = (request.headers or {}).get(REPLACED_HEADER)
    return replaced if isinstance(replaced, Mapping) else {}
