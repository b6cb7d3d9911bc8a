"""The message of a task that has ended for good is kept, so that a person can run it again.

It is kept as JSON: task, task id, arguments, and those options that a rerun publishes. A client
that can write to Redis may be able to forge one. So it must be of the record's own task and task
id, its queue must be one of the app's, and a person sees all that is published
(:func:`parts`).

A rerun is a new publish under the old task id, whose result then replaces the failure:

- If two people rerun it at once, or one repeats it after an error, the publishes are copies of one
  message, and one runs; the next also runs if that ends in an error that is not stored.
- It is published first; the receiving worker then forgets the outcome (`extensions.rerun`). A
  message that is lost on its way can be published again, and a process that dies in between leaves
  nothing half done. The message names the token of the outcome: of several messages for one
  outcome, only the first forgets it.
- It has no eta and no expiry, and may use all its retries again.
- It keeps its callbacks, the rest of its chain and its errbacks. It leaves its chord, which has
  already counted the failure and would count the call twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from logging import WARNING
from typing import Any, NamedTuple

from celery import Task
from celery.app.task import Context
from celery.canvas import Signature
from kombu.entity import Queue

from celery_idempotent.core.events.report import report
from celery_idempotent.core.events.table import Event
from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.forget import kept_message
from celery_idempotent.core.flow.thread import Executor
from celery_idempotent.core.key import Key
from celery_idempotent.core.payload.value_codec import JSON, dump, load
from celery_idempotent.core.record import message_field
from celery_idempotent.core.store import run_sync
from celery_idempotent.core.task.message.message_headers import MessageHeaders, id_text
from celery_idempotent.core.task.publish.message_copy import only_to_queue, with_derived_key
from celery_idempotent.core.task.publish.put_back import confirming_producer
from celery_idempotent.errors import CorruptRecordError

MESSAGE_NOT_KEPT = Event(WARNING, "cannot be run again later: its message is not kept: {error}")

#: Options that hold signatures, and when those run.
_CONTINUATION = {"chain": "then", "link": "then", "link_error": "after an error"}
#: Options that Celery takes from headers only.
_STAMPS = {"stamps": (dict,), "stamped_headers": (list,)}
#: The types of the options that a rerun keeps.
_OPTIONS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(_CONTINUATION, (list,)),
    **dict.fromkeys(("group_id", "root_id", "parent_id", "shadow"), (str,)),
    **dict.fromkeys(("argsrepr", "kwargsrepr", "queue"), (str,)),
    **dict.fromkeys(("group_index", "priority"), (int,)),
    **dict.fromkeys(("time_limit", "soft_time_limit"), (int, float)),
    "ignore_result": (bool,),
    "headers": (dict,),
    **_STAMPS,
}
#: Custom headers that are not kept, because on a rerun they would replace those that Celery writes,
#: or because RabbitMQ would copy the message into other queues (CC, BCC).
_DROPPED_HEADERS = frozenset(
    {*vars(Context), "lang", "task", "compression", "argsrepr", "kwargsrepr", "CC", "BCC"}
)
#: A kept message with more signatures is rejected, since a person is to see all of them.
MAX_PARTS = 10_000
#: A kept message is rejected if a number in its options (an index, a priority, seconds) is not
#: smaller.
_MAX_NUMBER = 10**9


def keep(call: Call, request: Context) -> None:
    """Keeps the message of `request` for as long as an error. Never raises."""
    settings, key, task_id = call.settings, call.key, call.task_id
    try:
        message = _written(call.sender, request)
        payload = dump(message, "json", settings)
        if load(payload, JSON) != message:
            raise TypeError("JSON would change its arguments")
        protect, field = call.codec.protect, message_field(task_id)
        # Stands for the token, which only makes the name of an offloaded object unique.
        unique = time.time_ns() // 1000
        payload = run_sync(protect(payload, settings, key=str(key), token=unique, field=field))
        if not payload.format:
            report(MESSAGE_NOT_KEPT, call, error=payload.body.decode())
            return
        store = call.runtime.store
        name = store.name(key.kept_message(task_id))
        store.query("SET", name, payload.to_bytes(), "PX", settings.error_ms)
    except Exception as error:
        report(MESSAGE_NOT_KEPT, call, error=error)


def _written(task: Task, request: Context) -> dict[str, Any]:
    """Returns the message of `request` as it is kept."""
    signature = task.signature_from_request(request, request.args, request.kwargs)
    headers: dict[str, Any] = signature.options.get("headers") or {}
    options = {**headers, **signature.options, "stamps": request.stamps or None}
    options["headers"] = {n: value for n, value in headers.items() if n not in _DROPPED_HEADERS}
    options |= {n: id_text(options[n]) for n in ("root_id", "parent_id") if options.get(n)}
    if isinstance(queue := options.get("queue"), Queue):
        options["queue"] = queue.name
    return {
        "task": task.name,
        "task_id": id_text(request.id),
        "args": [*signature.args],
        "kwargs": dict(signature.kwargs),
        "options": {name: value for name in _OPTIONS if (value := options.get(name)) is not None},
    }


def find(task: Any, key: Key, task_id: str) -> Signature | None:
    """Returns the message that was kept for `task_id`; None without one.

    Raises:
        IdempotencyError: if it cannot be read, or is not a message of `task` and `task_id`.
    """
    executor: Executor = task.idempotency_configuration.executor
    payload = kept_message(executor, key, task_id)
    if payload is None:
        return None
    stored = run_sync(executor.codec.decode_field(payload, str(key), message_field(task_id)))
    try:
        message = _read(stored, task, key, task_id)
        queue = message.options.get("queue")
        if queue and queue not in _queues(task, message):
            raise ValueError(f"its queue {queue!r} is not one of the app's: add it to task_queues")
    except Exception as error:
        reason = error if isinstance(error, ValueError) else type(error).__name__
        raise CorruptRecordError(f"{key}: its kept message cannot be used: {reason}") from error
    return message


def _read(stored: Any, task: Task, key: Key, task_id: str) -> Signature:
    """Returns the signature of a message that :func:`_written` has returned.

    Raises:
        Exception: if it describes anything else. A ValueError has the reason.
    """
    args, kwargs, options = stored["args"], stored["kwargs"], stored["options"]
    if (stored["task"], stored["task_id"]) != (task.name, task_id):
        raise ValueError("it belongs to another task or task id")
    if not (isinstance(args, list) and isinstance(kwargs, dict) and isinstance(options, dict)):
        raise ValueError("its arguments or options have another type")
    for name, value in options.items():
        if not isinstance(value, _OPTIONS.get(name, ())):
            raise ValueError(f"it has an option {name!r} that no message has")
        if isinstance(value, (int, float)) and not 0 <= value < _MAX_NUMBER:
            raise ValueError(f"its option {name!r} is out of range")
    headers = options.get("headers", {})
    if others := _DROPPED_HEADERS & headers.keys():
        raise ValueError(f"it has the header {min(others)!r}, which is never kept")
    carried = MessageHeaders.read(task.name, task_id, headers)
    keys = {carried.key.digest} if carried.key else set()
    if (explicit := carried.explicit_key) is not None:
        rule = task.idempotency_configuration.rule
        keys.add(explicit and rule.derive(args, kwargs, explicit_key=explicit).digest)
    if not keys <= {key.digest}:
        raise ValueError("it has another key")
    for link in chain.from_iterable(options.get(name, ()) for name in _CONTINUATION):
        if not (isinstance(link, dict) and isinstance(link.get("task"), str)):
            raise ValueError("its continuation is malformed")
    message: Signature = task.signature(args, kwargs).set(task_id=task_id, **options)
    # Counting them raises RecursionError if they are nested too deeply.
    if len([*islice(parts(message), MAX_PARTS + 1)]) > MAX_PARTS:
        raise ValueError(f"it has more than {MAX_PARTS:,} signatures: publish the call again")
    return message


def _queues(task: Task, message: Signature) -> set[str | None]:
    """Returns the names of the app's queues, and of those to which the message is routed."""
    amqp = task.app.amqp
    route = amqp.router.route({}, task.name, message.args, message.kwargs, task).get("queue")
    return {*amqp.queues, getattr(route, "name", route), getattr(task, "queue", None)}


class Part(NamedTuple):
    """A signature in a message that a rerun publishes."""

    #: When it runs; empty for the call itself.
    when: str
    #: The signature, in the form that it has in a message.
    signature: Mapping[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """Its arguments."""
        return {name: self.signature.get(name) for name in ("args", "kwargs")}

    def __str__(self) -> str:
        """Names its time, its task, and its queue, exchange or routing key if it has one."""
        task, options = self.signature["task"], self.signature.get("options")
        text = f"{self.when} {task}" if self.when else str(task)
        if not isinstance(options, Mapping):
            return text
        places = (options.get(name) for name in ("queue", "exchange", "routing_key"))
        queue = next((place for place in places if place and isinstance(place, str)), "")
        return f"{text} in queue {queue}" if queue else text


def parts(message: Signature) -> Iterator[Part]:
    """Yields the call itself, then all signatures in its continuation, and in theirs."""
    yield Part("", message)
    for option, when in _CONTINUATION.items():
        yield from _parts_in(message.options.get(option), when)


def _parts_in(value: Any, when: str) -> Iterator[Part]:
    """Yields all signatures inside of a value; any mapping that names a task may be one."""
    if isinstance(value, Mapping):
        if isinstance(value.get("task"), str):
            yield Part(when, value)
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        for member in value:
            yield from _parts_in(member, when)


def publish(signature: Signature, key: Key, token: int) -> str:
    """Publishes `signature`, which has a task id, for `key`; returns the task id.

    Args:
        key: the key of the call, for a signature whose headers have none.
        token: the token of the outcome that the rerun replaces; 0 without one.

    Raises:
        Exception: of the broker.
    """
    options = signature.options
    task_id, headers = options["task_id"], options.get("headers")
    carried = MessageHeaders.read(signature.task, task_id, headers)
    headers = with_derived_key(headers, carried.key or key, task_id, forgets=token)
    headers |= {name: options.pop(name) for name in _STAMPS if name in options}
    for link in options.get("chain", ()):
        if isinstance(link.get("options"), dict):
            link["options"].pop("chord", None)
    if queue := options.get("queue"):
        known = signature.app.amqp.queues.get(queue)
        signature.set(**only_to_queue(queue), declare=[known] if known else [])
    with confirming_producer(signature.app) as producer:
        signature.set(headers=headers).apply_async(producer=producer)
    return str(task_id)
