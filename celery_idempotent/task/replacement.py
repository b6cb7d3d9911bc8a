"""A task that replaces itself by a canvas in which it comes again.

Of the calls in that canvas that have the replaced task's key, the one that bears its id goes on
under it, and its outcome is the key's. The others are parts of that: each has a key of its own,
made of the key and its task id, so that its copies are known, and nothing waits for its own end.
Which keys were replaced stands in a header of every message of the canvas, since a call's key may
depend on results that it is yet to get.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from celery.canvas import Signature
from celery.utils import uuid

from celery_idempotent.key.key import Key

if TYPE_CHECKING:
    from celery.app.task import Context

#: Of each replaced key, by its name: the fingerprint, and the id of the task that had it.
REPLACED_HEADER = "idempotency_replaced"


def mark(canvas: Signature, key: Key, request: Context) -> None:
    """Let every message of `canvas` know that the task of `request`, under `key`, is replaced."""
    # In an eager run the task stays under way until the canvas has ended: all of it are parts.
    heir = "" if request.is_eager else request.id
    marks = {**_marks(request), str(key): f"{key.fingerprint.hex()}.{heir}"}
    nesting = (request.replaced_task_nesting or 0) + 1
    for member in _members(canvas):
        headers = member.options.get("headers") or {}
        # Celery itself sets the level at the first messages of a canvas only.
        member.set(headers={**headers, REPLACED_HEADER: marks}, replaced_task_nesting=nesting)


def key_in_canvas(key: Key, request: Context, member: str) -> Key:
    """The key at the gate of a call whose rule gives `key`.

    Args:
        member: the task id, or for an item of ``map`` one of its own.
    """
    replaced = _marks(request).get(str(key))
    if not isinstance(replaced, str):
        return key
    fingerprint, _, heir = replaced.partition(".")
    if heir == member:
        # Its arguments may be others than those that the key came with.
        return Key(key.task, key.digest, bytes.fromhex(fingerprint))
    # In an eager run every link of a chain has the same id; and none has a copy.
    return key.part(uuid() if request.is_eager else member)


def end_of(canvas: Signature) -> Signature | None:
    """The signature that is going to bear the replaced task's id; None for a group's results."""
    body, tasks = getattr(canvas, "body", None), getattr(canvas, "tasks", None)
    if tasks is None:
        return canvas
    if canvas.task == "celery.chain" and tasks:
        body = tasks[-1]
    return end_of(body) if isinstance(body, Signature) else None


def _members(canvas: Signature) -> Iterator[Signature]:
    """The signatures of single tasks in `canvas`."""
    tasks = getattr(canvas, "tasks", None)
    if tasks is None:
        yield canvas
        return
    for member in (*tasks, getattr(canvas, "body", None)):
        if isinstance(member, Signature):
            yield from _members(member)


def _marks(request: Context) -> Mapping[str, Any]:
    """None in a message that is no part of a replacement: a task may pass its own headers on."""
    if not (request.replaced_task_nesting or request.is_eager):
        return {}
    marks = (request.headers or {}).get(REPLACED_HEADER)
    return marks if isinstance(marks, Mapping) else {}
