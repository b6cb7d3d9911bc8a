"""Publishing that the broker has confirmed.

A message is put back and then acknowledged, on two connections: had the broker not taken the first
yet when it dies, the second would drop the only copy. AMQP lets a publisher wait for its word,
which Celery does only if it is told to (`confirm_publish`); other transports answer each publish.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from kombu import pools

#: Seconds that a broker may take to confirm.
CONFIRM_TIMEOUT = 10


@contextmanager
def confirming_producer(app: Celery) -> Iterator[Any]:
    """A producer whose `publish` returns when the broker has the message.

    None where the app's own does so, too.
    """
    connection = app.connection_for_write(
        transport_options={
            "confirm_publish": True,
            "read_timeout": CONFIRM_TIMEOUT,
            "write_timeout": CONFIRM_TIMEOUT,
        }
    )
    if connection.get_transport_cls().driver_type != "amqp":
        yield None
        return
    # One pool for equal connections: the connection itself is only its name.
    with pools.producers[connection].acquire(block=True) as producer:
        yield producer
