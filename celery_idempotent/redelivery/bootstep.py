"""The bootstep of the worker's consumer that starts and stops a `Renewal` for each connection."""

from __future__ import annotations

import logging
from typing import Any

from celery import bootsteps

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration import broker as configured_broker
from celery_idempotent.core.task.receive import request
from celery_idempotent.redelivery import broker as brokers
from celery_idempotent.redelivery import renewal
from celery_idempotent.redelivery.unacked import UnackedMessages

logger = logging.getLogger(__name__)


class Redelivery(bootsteps.StartStopStep):
    """Starts after the consumer's Tasks step, before which no message is received."""

    requires = ("celery.worker.consumer.tasks:Tasks",)
    label = "Redelivery"

    def start(self, parent: Any) -> None:
        """Starts renewing; Celery also calls it after each reconnect.

        After a reconnect, a new `Renewal` begins without messages: those of the lost connection no
        longer belong to this worker.
        """
        self.shutdown(parent)
        enabled = app_tasks.enabled(parent.app)
        if all(task.idempotency_configuration.in_shadow for task in enabled):
            return
        redelivery = configured_broker.describe_redelivery(parent.app)
        logger.info("Redelivery of a dead worker's messages: %s", redelivery)
        seconds = configured_broker.redeliver_after(parent.app)
        if seconds is None:
            return
        unacked = UnackedMessages(parent.app, parent.pool)
        broker: brokers.OwnConnection
        if parent.connection.transport.driver_type == "sqs":
            broker = brokers.SqsBroker(parent.connection)
        else:
            broker = brokers.RedisBroker(parent.connection)
            channel = parent.task_consumer.channel
            brokers.declare_exchanges(channel, parent.app.amqp.queues.values())
            qos = channel.qos
            brokers.hide_from_delivery_on(qos, seconds, unacked.includes)
            brokers.free_slots_of_failed_acks(qos)
        renewal.current = renewal.Renewal(broker, unacked, seconds)
        renewal.current.start()

    def stop(self, parent: Any) -> None:
        """Stops renewing the messages that wait; a warm shutdown still finishes those that run."""
        if renewal.current is not None:
            renewal.current.unacked.stop()

    def shutdown(self, parent: Any) -> None:
        """Stops renewing; Celery calls it when the pool has ended."""
        if renewal.current is not None:
            renewal.current.stop()
            renewal.current = request.received = None
