"""Prepares the canvas with which a task replaces itself.

`IdempotentTask.replace` calls it before Celery publishes the canvas. `core.task.message.canvas`
then derives the keys of the calls in it.
"""

from __future__ import annotations

from collections.abc import Iterator

from celery.app.task import Context
from celery.canvas import Signature
from celery.states import PROPAGATE_STATES

from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report
from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.values import Delegate
from celery_idempotent.core.key import Key
from celery_idempotent.core.task.message import message_headers
from celery_idempotent.core.task.message.canvas import REPLACED_HEADER, replaced_keys
from celery_idempotent.core.task.message.continuation import GENERATIONS
from celery_idempotent.core.task.message.key_resolution import resolve_key
from celery_idempotent.core.task.message.message_headers import id_text
from celery_idempotent.errors import IdempotencyError


def replace_by(sig: Signature, call: Call, request: Context) -> Delegate:
    """Prepares `sig` to replace the task of `call`, and returns the consequence for the key."""
    task = call.sender
    in_shadow = task.idempotency_configuration.in_shadow
    generation = (call.data.generation // GENERATIONS + 1) * GENERATIONS
    mark_replaced(sig, call.key, request)
    if not in_shadow and not request.is_eager:
        # The backend may still have an error of this task id from before it ran again. It would be
        # taken for the error of the replacement, and free the key.
        try:
            if task.AsyncResult(call.task_id).state in PROPAGATE_STATES:
                task.backend.forget(call.task_id)
        except Exception as error:
            report(table.RESULT_UNREADABLE, call, error=error)
    last = last_signature(sig)
    stores_result = last is None or not ignores_result(last) or _completes_key(last, call, request)
    return Delegate(awaited=generation, stores_result=stores_result)


def _completes_key(sig: Signature, call: Call, request: Context) -> bool:
    """Returns whether `sig`, which replaces the task of `call`, will complete its key."""
    configuration = call.sender.idempotency_configuration
    if sig.task != call.key.task:
        return False
    try:
        options = message_headers.of_options(
            sig.task, call.task_id, sig.options, in_shadow=configuration.in_shadow
        )
        headers = options.get("headers")
        key, _ = resolve_key(
            configuration, call.task_id, headers, sig.args, sig.kwargs, request=request
        )
    except (IdempotencyError, TypeError):
        return False  # the execution of `sig` will raise the error
    return key is not None and key.digest == call.key.digest


def ignores_result(sig: Signature) -> bool:
    """Returns whether the result of `sig` is not stored."""
    ignores = sig.options.get("ignore_result")
    if ignores is None:
        ignores = getattr(sig.app.tasks.get(sig.task), "ignore_result", False)
    return bool(ignores)


def mark_replaced(canvas: Signature, key: Key, request: Context) -> None:
    """Writes into every message of `canvas` that it replaces the task of `request` under `key`."""
    # An eager task runs until its canvas has ended. So no call of the canvas continues under the
    # key of the task: each is a part, with a key of its own.
    successor_id = "" if request.is_eager else id_text(request.id)
    value = f"{key.fingerprint.hex()}.{successor_id}"
    replaced = {**replaced_keys(request), str(key): value}
    nesting = (request.replaced_task_nesting or 0) + 1
    for sig in signatures(canvas):
        if getattr(sig, "tasks", None) is not None:
            continue  # a group or chain is no message: Celery publishes its parts
        headers = {**(sig.options.get("headers") or {}), REPLACED_HEADER: replaced}
        # Celery itself sets the nesting only on the first messages of a canvas.
        sig.set(headers=headers, replaced_task_nesting=nesting)


def last_signature(canvas: Signature) -> Signature | None:
    """Returns the signature that gets the replaced task's id; None if a group ends the canvas."""
    body, tasks = getattr(canvas, "body", None), getattr(canvas, "tasks", None)
    if tasks is None:
        return canvas
    if canvas.task == "celery.chain" and tasks:
        body = tasks[-1]
    return last_signature(body) if isinstance(body, Signature) else None


def signatures(sig: Signature) -> Iterator[Signature]:
    """Iterates over `sig` and its parts."""
    yield sig
    for part in (*(getattr(sig, "tasks", None) or ()), getattr(sig, "body", None)):
        if isinstance(part, Signature):
            yield from signatures(part)
