"""What Celery's delayed delivery (native to RabbitMQ) needs of a message that is published again.

Celery uses it wherever one of the app's queues is a quorum queue. It takes whole seconds, refuses
less than one, and sends a message whose queue is not named to the default queue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from celery import Celery

from celery_idempotent.configuration.broker import quorum_queues
from celery_idempotent.task.eta import seconds_until

#: Before the routing key of a message that was delayed: its seconds, bit by bit.
_DELAY = re.compile(r"(?:[01]\.){28}")


def fitting(app: Celery, delivery_info: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` for publishing a message again that was delivered with `delivery_info`."""
    options = dict(options)
    if quorum_queues(app):
        if 0 < seconds_until(options.get("eta") or options.get("countdown")) < 1:
            options |= {"eta": None, "countdown": 1}
        if not options.get("queue") and (queue := _queue_of(app, delivery_info or {})):
            options["queue"] = queue.name
    return options


def _queue_of(app: Celery, delivery_info: Mapping[str, Any]) -> Any:
    """The queue that the message came from, by its routing key; None if there is none.

    After a delay its exchange is that of the delayed delivery, and no longer its own.
    """
    routing_key, delayed = _DELAY.subn("", delivery_info.get("routing_key") or "", count=1)
    for queue in app.amqp.queues.values():
        own_exchange = delayed or queue.exchange.name == delivery_info.get("exchange")
        if own_exchange and queue.routing_key == routing_key:
            return queue
    return None
