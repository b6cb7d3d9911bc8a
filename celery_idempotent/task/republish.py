"""What Celery leaves out where it publishes a message again, for a retry or for later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery.canvas import Signature
from celery.utils.saferepr import saferepr
from kombu.entity import Exchange, Queue
from kombu.serialization import registry

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context

#: Headers that Celery would set afresh. It takes an empty parent for a missing one.
_HEADERS = ("root_id", "parent_id", "origin", "ignore_result")
#: What kombu hands over to the broker as it is.
_PROPERTIES = (
    "delivery_mode",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
#: As AMQP brokers deliver it; of other messages it is noted under this name.
CONTENT_TYPE = "content_type"


def keep(message: Signature, request: Context, given: Mapping[str, Any]) -> None:
    """Give `message` all that the one of `request` came with, but for what is `given` anew."""
    if request.is_eager or request.called_directly:
        return
    came_with = vars(request)
    properties = request.properties or {}
    options = {name: properties[name] for name in _PROPERTIES if properties.get(name) is not None}
    serializer = registry.type_to_name.get(properties.get(CONTENT_TYPE))
    if serializer is not None:
        options["serializer"] = serializer
    if came_with.get("compression"):
        options["compression"] = came_with["compression"]
    message.set(**{name: value for name, value in options.items() if name not in given})
    if not given.get("queue"):
        _send_to_one_worker(message, request)
    if message.app.conf.task_protocol == 2:
        headers = {name: came_with[name] for name in _HEADERS if name in {*came_with} - {*given}}
        headers |= _representations(message, request)
        message.set(headers={**(message.options.get("headers") or {}), **headers})


def _send_to_one_worker(message: Signature, request: Context) -> None:
    """A message that came by a fanout exchange has come to every worker: it goes back to this one.

    Where the transport delivers a fanout past its queues (Redis), it goes to another queue.
    """
    came_by = request.delivery_info or {}
    # The exchange; or, where it has come back to its queue already, that.
    name = came_by.get("exchange") or came_by.get("routing_key")
    app = message.app
    mine = app.amqp.queues.consume_from.values()
    fanouts = [queue for queue in mine if queue.exchange.type == "fanout"]
    own = next((queue for queue in fanouts if name in (queue.exchange.name, queue.name)), None)
    if own is None:
        return
    with app.connection_for_write() as connection:
        reaches_queues = connection.transport.driver_type == "amqp"
    if reaches_queues:
        own = Queue(own.name, Exchange(""), routing_key=own.name, no_declare=True)
    else:
        own = next((queue for queue in mine if queue not in fanouts), app.amqp.default_queue)
    for option in ("exchange", "routing_key"):
        message.options.pop(option, None)
    message.set(queue=own)


def _representations(message: Signature, request: Context) -> dict[str, str]:
    """How events and logs show the arguments: the caller may have hidden them.

    Where a retry has other arguments, only what is not simply their text stays.
    """
    shown = {}
    for name, before, after in (
        ("argsrepr", tuple(request.args or ()), tuple(message.args)),
        ("kwargsrepr", dict(request.kwargs or {}), dict(message.kwargs)),
    ):
        text = vars(request).get(name)
        if text is not None and (after == before or text != _as_celery_shows(before, message.app)):
            shown[name] = text
    return shown


def _as_celery_shows(arguments: Any, app: Celery) -> str:
    levels = app.conf.get("task_repr_maxlevels", 3)
    text: str = saferepr(arguments, app.amqp.argsrepr_maxsize, maxlevels=levels)
    return text
