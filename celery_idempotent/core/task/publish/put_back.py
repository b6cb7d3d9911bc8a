"""Publishing a received message again: for a retry, or for a later delivery.

Celery's own ``signature_from_request`` drops some properties of the message. Its delayed delivery
(used on RabbitMQ if a queue of the app is a quorum queue) accepts only whole seconds from one up,
and sends a message without a named queue to the default queue.

A message that cannot be published again is requeued. The broker redelivers it at once, so the
worker pauses before it requeues one. Quorum queues count deliveries, and by default RabbitMQ 4
drops a message after 20 of them, so the pause grows with that count. The worker keeps trying to
publish during the pause, which therefore ends as soon as the broker accepts messages again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from typing import Any

from celery import Celery, Task
from celery.app.task import Context
from celery.canvas import Signature
from celery.exceptions import Reject, SoftTimeLimitExceeded
from celery.utils.saferepr import saferepr
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import pools
from kombu.entity import Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.serialization import registry
from kombu.transport.virtual.exchange import TopicExchange

from celery_idempotent.core import worker
from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.configuration import broker
from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report
from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.values import PutBack
from celery_idempotent.core.key import Key
from celery_idempotent.core.task.message.message_headers import (
    DERIVED_KEY_HEADER,
    MessageHeaders,
    Waits,
    id_text,
)
from celery_idempotent.errors import IdempotencyError, KeyRuleError, StoreUnavailableError

#: Seconds before the first requeue of a message, and between two attempts to publish it.
REQUEUE_PAUSE = 1.0
#: Each requeue of one message multiplies its pause by this.
PAUSE_FACTOR = 4
#: The longest pause in seconds. It occupies a slot of the pool, and with the default prefetch
#: multiplier a message waits for four others: together less than RabbitMQ's consumer timeout of 30
#: minutes.
LONGEST_PAUSE = 300.0

#: The longest wait of a message in a worker, in seconds, if the transport has no visibility
#: timeout: half of RabbitMQ's consumer timeout.
LONGEST_WAIT = 900.0

#: The header in which RabbitMQ counts the deliveries of a message from a quorum queue.
DELIVERY_COUNT_HEADER = "x-delivery-count"

#: Headers that Celery would replace. It treats an empty parent as a missing one.
_HEADERS = ("root_id", "parent_id", "origin", "ignore_result")
#: Properties that kombu passes to the broker unchanged.
_PROPERTIES = frozenset(
    {"delivery_mode", "message_id", "timestamp", "type", "user_id", "app_id", "cluster_id"}
)
#: A property of AMQP messages. `IdempotentRequest` adds it to messages from other brokers.
CONTENT_TYPE = "content_type"
#: The prefix of a delayed message's routing key: its seconds, bit by bit.
_DELAY = re.compile(r"(?:[01]\.){28}")
#: RabbitMQ's headers about dead-lettering and requeues.
_DEATH = re.compile(r"x-((first-|last-)?death|delivery-count)")
#: The time in seconds for a broker to confirm a publish.
CONFIRM_TIMEOUT = 10


def put_back(
    call: Call, request: Context, end: PutBack, received: MessageHeaders, began_at: float
) -> None:
    """Publishes the message again; afterwards this copy can be acknowledged.

    The order matters: a broker may acknowledge the original together with a copy. If publishing
    fails, this copy is requeued; if the broker is not available for that either, it will redeliver
    the copy on its own.

    Args:
        received: the headers of the message.
        began_at: seconds of `monotonic`.

    Raises:
        Reject: if the message cannot be published again.
    """
    task, key, seconds, record, waits = call.sender, call.key, end.seconds, end.record, None
    if end.fallback and record and not broker.quorum_queues(task.app):
        since_ms = received.waits.since_ms if received.waits else time.time_ns() // 1_000_000
        seconds, waits = end.fallback, Waits(since_ms, record.token, record.task_id[:255])
    seconds = min(seconds, longest_wait(task.app))
    count = received.put_back_count + 1
    headers = received._replace(
        key=key, put_back_count=count, rollback_count=end.rollback_count, waits=waits
    ).write(key.task, call.task_id, _without_deaths(request.headers))
    pause = RequeuePause(task, request, began_at)
    while True:
        try:
            _publish_again(task, request, headers, seconds)
            break
        except Exception as error:
            if not pause.wait(error):
                report(table.RETURNED, call, error=str(error), reason=end.reason)
                message = f"{end.reason}; and the message cannot be published again: {error}"
                raise Reject(message, requeue=True) from None
    outage = call.runtime.store.node_of(key).outage
    in_outage = outage.failed_calls and isinstance(end.reason, StoreUnavailableError)
    event = table.PUT_BACK_IN_OUTAGE if in_outage else table.PUT_BACK
    unless = " unless woken" if waits else ""
    report(event, call, seconds=seconds, unless=unless, reason=end.reason)


def _publish_again(task: Task, request: Context, headers: dict[str, Any], countdown: float) -> None:
    """Publishes the message of `request` with these headers of this package."""
    expires = request.expires
    if expires and task.app.conf.task_protocol == 2:
        # Kept only in the header: Celery would also pass it to the broker, which drops every
        # expired message. A worker runs one whose execution began before it expired.
        headers, expires = {**headers, "expires": expires}, None
    options = {"countdown": countdown, "expires": expires, "add_to_parent": False}
    signature = task.signature_from_request(request, **options)
    signature.set(headers={**signature.options["headers"], **headers})
    request.idempotency_headers_again = signature.options["headers"]
    with confirming_producer(task.app) as producer:
        signature.apply_async(producer=producer)


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
    return carried.write(key.task, task_id, _without_deaths(headers))


def next_headers(
    task: str,
    task_id: str,
    headers: Mapping[str, Any] | None,
    new_headers: Mapping[str, Any] | None,
    key: Key | None = None,
) -> dict[str, Any]:
    """Returns the headers of a retry: with the keys of the call, and never those of a put-back.

    Args:
        headers: of the message.
        new_headers: to send instead.
        key: of the call.

    Raises:
        KeyRuleError: if the new ones hold another explicit key.
    """
    own, given = MessageHeaders.read(task, task_id, headers), new_headers
    new = own if given is None else MessageHeaders.read(task, task_id, given)
    if new.explicit_key not in (None, own.explicit_key):
        raise KeyRuleError(
            f"{task}: a retry keeps the key of its call; remove idempotency_key from its headers"
        )
    result_ttl = new.result_ttl if own.result_ttl is None else own.result_ttl
    carried = MessageHeaders(own.explicit_key, result_ttl, key or own.key)
    return carried.write(task, task_id, _without_deaths(headers if given is None else given))


def was_put_back(task: str, headers: Mapping[str, Any] | None) -> bool:
    """Returns whether a message of `task`, with its id in the headers, was put back."""
    text = (headers or {}).get(DERIVED_KEY_HEADER)
    if not isinstance(text, str) or text.count(".") < 4:
        return False  # most messages
    try:
        task_id = id_text((headers or {})["id"])
        return bool(MessageHeaders.read(task, task_id, headers).put_back_count)
    except (IdempotencyError, KeyError):
        return False


def _without_deaths(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns `headers` without those of RabbitMQ about dead-lettering and requeues.

    RabbitMQ drops a message that is dead-lettered in a cycle. A message with these headers that
    waits in the queues of the delayed delivery looks like one.
    """
    return {name: value for name, value in (headers or {}).items() if not _DEATH.match(name)}


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
        headers = {name: received[name] for name in _HEADERS if name in {*received} - {*options}}
        headers |= _representations(signature, request)
        signature.set(headers={**(signature.options.get("headers") or {}), **headers})


def _return_to_queue(signature: Signature, request: Context) -> None:
    """Routes a message to the queue from which this worker has received it.

    Through its exchange, it would also reach the queues of other workers and services, each of
    which has already received it. If the transport delivers a fanout without queues (Redis), the
    message goes to another queue.
    """
    app = signature.app
    consumed = app.amqp.queues.consume_from.values()
    # A queue that the worker consumes since a command of an operator may be among the others.
    queues, delivery_info = [*consumed, *app.amqp.queues.values()], request.delivery_info or {}
    source = _received_from(queues, delivery_info)
    if source is None or (not delivery_info.get("exchange") and source.exchange.type == "direct"):
        return  # Celery publishes to the queue itself
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
    if not exchange:  # published, or returned, to the queue itself
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


def _representations(signature: Signature, request: Context) -> dict[str, str]:
    """Returns ``argsrepr`` and ``kwargsrepr``, with which the publisher may hide arguments.

    If the arguments differ from the received ones, only a text that the publisher chose is kept.
    """
    headers, by_celery = {}, _representation_of(signature.app)
    for name, before, after in (
        ("argsrepr", tuple(request.args or ()), tuple(signature.args)),
        ("kwargsrepr", dict(request.kwargs or {}), dict(signature.kwargs)),
    ):
        text = vars(request).get(name)
        if text is not None and (after == before or text != by_celery(before)):
            headers[name] = text
    return headers


def _representation_of(app: Celery) -> Callable[[Any], str]:
    levels = app.conf.get("task_repr_maxlevels", 3)
    return partial(saferepr, maxlen=app.amqp.argsrepr_maxsize, maxlevels=levels)


def change_arguments(
    app: Celery, request: Context, args: list[Any], kwargs: dict[str, Any]
) -> None:
    """Gives a message that is about to run other arguments.

    Celery's tracer has the same list and dictionary as the request, so they are changed in place.
    A representation that the publisher chose, to hide arguments, is kept.
    """
    by_celery = _representation_of(app)
    for name, before, after in (
        ("argsrepr", tuple(request.args or ()), tuple(args)),
        ("kwargsrepr", dict(request.kwargs or {}), kwargs),
    ):
        if vars(request).get(name) == by_celery(before):
            setattr(request, name, by_celery(after))
    if isinstance(request.args, list):
        request.args[:] = args
    else:
        request.args = args
    request.kwargs.clear()
    request.kwargs.update(kwargs)


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


@contextmanager
def confirming_producer(app: Celery) -> Iterator[Any]:
    """Yields a producer whose `publish` returns when the broker has accepted the message.

    A message is published again on one connection and then acknowledged on another. If the broker
    dies in between without accepting it, the acknowledgement drops the only copy. AMQP brokers
    confirm each publish, but Celery waits for that only with `confirm_publish`. Other transports
    reply to each publish, so the app's own producer suffices, and None is yielded.
    """
    timeouts = {"read_timeout": CONFIRM_TIMEOUT, "write_timeout": CONFIRM_TIMEOUT}
    connection = app.connection_for_write(transport_options={"confirm_publish": True, **timeouts})
    if connection.get_transport_cls().driver_type != "amqp":
        yield None
        return
    # Equal connections share one pool; this one only serves as its key.
    with pools.producers[connection].acquire(block=True) as producer:
        yield producer


def broker_errors(app: Celery) -> tuple[type[Exception], ...]:
    """Returns the errors of a publish after which another attempt may succeed."""
    connection = app.connection_for_write()
    errors = connection.recoverable_connection_errors + connection.recoverable_channel_errors
    return (OperationalError, OSError, StoreUnavailableError, *errors)


class RequeuePause:
    """The pause before one delivery of a message is requeued.

    Args:
        began_at: when the time limit of the task began, in monotonic seconds.
    """

    def __init__(self, task: Task, request: Context, began_at: float) -> None:
        deliveries = (request.headers or {}).get(DELIVERY_COUNT_HEADER) or 0
        pause: float = REQUEUE_PAUSE * PAUSE_FACTOR ** min(deliveries, 10)
        hard_limit = (request.timelimit or (None,))[0] or task.time_limit
        if hard_limit:
            # A worker that kills a process at the hard limit acknowledges its message.
            pause = min(pause, (began_at + hard_limit - monotonic()) / 2)
        self._seconds = min(pause, LONGEST_PAUSE, longest_wait(task.app))
        self._ends_at = monotonic() + self._seconds

    def wait(self, error: BaseException) -> bool:
        """Sleeps until the next attempt to publish; returns False to requeue the message now.

        A soft time limit ends the pause because the hard limit follows; a shutdown also ends it.

        Args:
            error: of the last attempt.
        """
        left = self._ends_at - monotonic()
        counters = worker.counters
        shutting_down = counters is not None and counters.shutting_down
        if isinstance(error, SoftTimeLimitExceeded) or shutting_down or left <= 0:
            return False
        try:
            time.sleep(min(left, REQUEUE_PAUSE))
        except SoftTimeLimitExceeded:
            return False
        return True


def longest_wait(app: Celery) -> float:
    """Returns how many seconds a message may wait in a worker without being redelivered."""
    visibility_timeout = broker.visibility_timeout(app)
    return min(LONGEST_WAIT, visibility_timeout / 2) if visibility_timeout else LONGEST_WAIT


def seconds_until(when: float | datetime | str | None) -> float:
    """Returns the seconds until a countdown (seconds) or an eta; 0 for None and for the past.

    An eta may be ISO 8601 text, as in a message. Without a time zone it is in UTC, as in a worker.
    """
    if isinstance(when, (datetime, str)):
        eta: datetime = maybe_make_aware(maybe_iso8601(when), timezone.utc)
        return max(0.0, (eta - datetime.now(timezone.utc)).total_seconds())
    return float(when or 0.0)


def delay_of(options: Mapping[str, Any]) -> float:
    """Returns the seconds until the eta or countdown in `options`; 0 without one."""
    return seconds_until(options.get("eta") or options.get("countdown"))


def hold_for(options: Mapping[str, Any], lease: float) -> float:
    """Returns the seconds for which a key is reserved for a message published with `options`.

    The reservation ends `lease` seconds after the message's eta, or at its expiry if that is first.
    """
    hold = delay_of(options) + lease
    expires = options.get("expires")
    return hold if expires is None else min(hold, max(0.0, seconds_until(expires)))
