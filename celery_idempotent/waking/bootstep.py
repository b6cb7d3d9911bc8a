"""The bootstep of the worker's consumer that makes a `WaitingMessages` for each connection."""

from __future__ import annotations

import logging
from typing import Any

from celery import Celery, bootsteps

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration import broker as configured_broker
from celery_idempotent.core.flow.conflict import LONGEST_DELAY
from celery_idempotent.core.task.receive import request
from celery_idempotent.waking import waiting_messages

logger = logging.getLogger(__name__)


class Waking(bootsteps.StartStopStep):
    """Starts after the consumer's Tasks step, before which no message is received."""

    requires = ("celery.worker.consumer.tasks:Tasks",)
    label = "Waking"

    def start(self, parent: Any) -> None:
        """Begins to collect messages that wait; Celery also calls it after each reconnect."""
        enabled = app_tasks.enabled(parent.app)
        if all(task.idempotency_configuration.in_shadow for task in enabled):
            return
        logger.info("Duplicates that wait for a running call: %s", describe(parent.app))
        current = waiting_messages.current = waiting_messages.WaitingMessages(parent)
        request.schedule = current.schedule

    def stop(self, parent: Any) -> None:
        """Ends the collection: from now on, messages start at their ETA."""
        if waiting_messages.current is not None:
            waiting_messages.current.close()
            waiting_messages.current = request.schedule = None


def describe(app: Celery) -> str:
    """Returns when a message that was put back because of a conflict is delivered again."""
    if configured_broker.quorum_queues(app):
        return (
            f"delivered again after 1 to {LONGEST_DELAY:g} s, since RabbitMQ delays the "
            "messages of quorum queues"
        )
    return "woken when it ends"
