"""A copy of a received message, which is published again: for a retry, a put-back, or a rerun.

Celery's own ``signature_from_request`` drops some properties of the message. Its delayed delivery
(used on RabbitMQ if a queue of the app is a quorum queue) accepts only whole seconds from one up,
and sends a message without a named queue to the default queue.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.canvas import Signature
from celery.utils.saferepr import saferepr
from kombu.entity import Exchange, Queue
from kombu.serialization import registry
from kombu.transport.virtual.exchange import TopicExchange

from celery_idempotent.core.configuration import broker
from celery_idempotent.core.key import Key
from celery_idempotent.core.task.message.eta import delay_of
from celery_idempotent.core.task.message.message_headers import (
    DERIVED_KEY_HEADER,
    MessageHeaders,
    as_mapping,
    id_text,
)
from celery_idempotent.errors import IdempotencyError, KeyRuleError

#: Headers that Celery would write anew for the copy. It replaces an empty parent, for example, by
#: the task that is running.
_HEADERS = ("root_id", "parent_id", "origin", "ignore_result")
#: Properties that kombu passes to the broker unchanged.
_PROPERTIES = frozenset(
    {"delivery_mode", "message_id", "timestamp", "type", "user_id", "app_id", "cluster_id"}
)
#: The property of AMQP messages that names the serialization of the body. `IdempotentRequest` adds
#: it to messages from other brokers, so that a copy can be serialized in the same way.
CONTENT_TYPE = "content_type"
#: The prefix of a delayed message's routing key: its seconds, bit by bit.
_DELAY = re.compile(r"(?:[01]\.){28}")
#: RabbitMQ's headers about dead-lettering and requeues.
_X_DEATH = re.compile(r"x-((first-|last-)?death|delivery-count)")


def with_derived_key(
    headers: Mapping[str, Any] | None,
    key: Key,
    task_id: str,
    **fields: Any,
) -> dict[str, Any]:
    """Returns `headers` for a message that is published under `task_id`, or published again.

    Args:
        fields: other fields of `MessageHeaders`, such as ``put_back_count``.
    """
    own = MessageHeaders.read(key.task, task_id, headers)
    carried = MessageHeaders(own.explicit_key, own.result_ttl, key, **fields)
    return carried.write(key.task, task_id, without_x_death(headers))


def retry_headers(
    task: str,
    task_id: str,
    headers: Mapping[str, Any] | None,
    new_headers: Any,
    key: Key | None = None,
) -> dict[str, Any]:
    """Returns the headers of a retry: with the keys of the call, and never those of a put-back.

    Args:
        headers: of the message.
        new_headers: that the caller of the retry wants instead, as Celery accepts them, or None.
        key: of the call.

    Raises:
        KeyRuleError: if the new ones hold another explicit key.
        TypeError, ValueError: as in Celery, if they are no headers.
    """
    sent = headers if new_headers is None else as_mapping(new_headers)
    own, new = (MessageHeaders.read(task, task_id, each) for each in (headers, sent))
    if new.explicit_key not in (None, own.explicit_key):
        raise KeyRuleError(
            f"{task}: a retry keeps the key of its call; remove idempotency_key from its headers"
        )
    result_ttl = new.result_ttl if own.result_ttl is None else own.result_ttl
    carried = MessageHeaders(own.explicit_key, result_ttl, key or own.key)
    return carried.write(task, task_id, without_x_death(sent))


def was_put_back(task: str, headers: Mapping[str, Any] | None) -> bool:
    """Returns whether a message of `task`, with its id in the headers, was put back."""
    text = (headers or {}).get(DERIVED_KEY_HEADER)
    if not isinstance(text, str) or text.count(".") < 4:
        return False  # it was never published again, as most messages
    try:
        task_id = id_text((headers or {})["id"])
        return bool(MessageHeaders.read(task, task_id, headers).put_back_count)
    except (IdempotencyError, KeyError):
        return False


def without_x_death(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns `headers` without those of RabbitMQ about dead-lettering and requeues.

    RabbitMQ drops a message that is dead-lettered in a cycle. A message with these headers that
    waits in the queues of the delayed delivery looks like one.
    """
    return {name: value for name, value in (headers or {}).items() if not _X_DEATH.match(name)}


def copy_properties(signature: Signature, request: Context, options: Mapping[str, Any]) -> None:
    """Copies the properties and headers of a received message to `signature`, except `options`.

    Args:
        options: of the new message; they take precedence.
    """
    if request.is_eager or request.called_directly:
        return
    received = vars(request)
    properties = request.properties or {}
    copied = {name: properties.get(name) for name in _PROPERTIES}
    copied["serializer"] = registry.type_to_name.get(properties.get(CONTENT_TYPE))
    copied["compression"] = received.get("compression") or None
    known = {name: value for name, value in copied.items() if value is not None}
    signature.set(**{name: known[name] for name in known.keys() - options.keys()})
    if not any(map(options.get, ("queue", "exchange", "routing_key"))):
        _return_to_queue(signature, request)
    if signature.app.conf.task_protocol == 2:
        copied = {name: received[name] for name in _HEADERS if name in received}
        copied |= representations(request, signature.args, signature.kwargs, signature.app)
        headers = {name: copied[name] for name in copied.keys() - options.keys()}
        signature.set(headers={**(signature.options.get("headers") or {}), **headers})


def _return_to_queue(signature: Signature, request: Context) -> None:
    """Routes a message to the queue from which this worker has received it.

    Through its exchange, it would also reach the queues of other workers and services, each of
    which has already received it. If the transport delivers a fanout without queues (Redis), the
    message goes to another queue.
    """
    app = signature.app
    consumed = app.amqp.queues.consume_from.values()
    # All queues follow, because those that `add_consumer` has added are not in `consume_from`.
    queues, delivery_info = [*consumed, *app.amqp.queues.values()], request.delivery_info or {}
    source = _received_from(queues, delivery_info)
    if source is None or (not delivery_info.get("exchange") and source.exchange.type == "direct"):
        return  # Celery has named the queue, from the routing key
    if source.exchange.type == "fanout":
        with app.connection_for_write() as connection:
            reaches_queues = connection.transport.driver_type == "amqp"
        if not reaches_queues:
            others = (queue for queue in consumed if queue.exchange.type != "fanout")
            source = next(others, app.amqp.default_queue)
    signature.set(**only_to_queue(source.name))


def only_to_queue(name: str) -> dict[str, Any]:
    """Returns the options with which a message reaches the queue `name` and no other.

    They name the exchange and the key, too, since ``task_routes`` may add its own. The queue must
    exist: it is not declared.
    """
    queue = Queue(name, Exchange(""), routing_key=name, no_declare=True)
    return {"exchange": "", "routing_key": name, "queue": queue}


def _received_from(queues: Iterable[Queue], delivery_info: Mapping[str, Any]) -> Queue | None:
    """Returns the one of `queues` that delivered a message; the likeliest if several may have."""
    exchange, key = delivery_info.get("exchange"), delivery_info.get("routing_key") or ""
    if not exchange:  # the default exchange, whose routing keys are names of queues
        return next((queue for queue in queues if queue.name == key), None)
    pattern: Callable[[str], str] = TopicExchange(None).key_to_pattern
    bound: list[Queue] = []
    for queue in queues:
        for binding in (queue, *queue.bindings):
            if binding.exchange is not None and binding.exchange.name == exchange:
                if re.match(pattern(binding.routing_key or ""), key):
                    return queue
                bound.append(queue)
    return bound[0] if bound else None


def representations(request: Context, args: Any, kwargs: Any, app: Celery) -> dict[str, str]:
    """Returns ``argsrepr`` and ``kwargsrepr`` of a copy of `request` with these arguments.

    A text that the publisher chose, which may hide arguments, is kept. If Celery wrote it, and the
    arguments differ, it is written anew.
    """
    levels = app.conf.get("task_repr_maxlevels", 3)
    by_celery = partial(saferepr, maxlen=app.amqp.argsrepr_maxsize, maxlevels=levels)
    texts = {}
    for name, before, after in (
        ("argsrepr", tuple(request.args or ()), tuple(args)),
        ("kwargsrepr", dict(request.kwargs or {}), dict(kwargs)),
    ):
        text = vars(request).get(name)
        if text is not None:
            is_stale = after != before and text == by_celery(before)
            texts[name] = by_celery(after) if is_stale else text
    return texts


def adapt_to_delayed_delivery(
    app: Celery, request: Context, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns `options` of a new message for `request` in a form that delayed delivery accepts."""
    adapted = dict(options)
    if broker.quorum_queues(app):
        if 0 < delay_of(options) < 1:
            adapted |= {"eta": None, "countdown": 1}
        if not options.get("queue") and (queue := _source_queue(app, request.delivery_info or {})):
            adapted["queue"] = queue.name
    return adapted


def _source_queue(app: Celery, delivery_info: Mapping[str, Any]) -> Any:
    """Returns the queue with the routing key of a received message, or None.

    After a delay, the exchange of the message is that of the delayed delivery, not its own.
    """
    routing_key, delayed = _DELAY.subn("", delivery_info.get("routing_key") or "", count=1)
    for queue in app.amqp.queues.values():
        own_exchange = delayed or queue.exchange.name == delivery_info.get("exchange")
        if own_exchange and queue.routing_key == routing_key:
            return queue
    return None
