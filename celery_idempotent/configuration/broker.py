"""The broker's settings that decide when an unacknowledged message is redelivered."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any, TypeVar

from celery import Celery

from celery_idempotent import settings

T = TypeVar("T")

#: Transports with a visibility timeout, and its default in seconds.
VISIBILITY_TIMEOUT = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}
#: Amazon's default in seconds, for queues that kombu has not created.
SQS_VISIBILITY_TIMEOUT = 30.0

#: Schemes of AMQP, which drops the properties of a message that it does not define.
AMQP = ("amqp", "amqps", "pyamqp", "librabbitmq", "qpid")


def transport(app: Celery) -> str:
    """Returns the scheme of the broker's URL: ``redis``, ``amqp``, ``sqs`` …"""
    url = str(app.conf.broker_read_url or "")
    return url.split("://", 1)[0].split("+", 1)[0].lower()


def options_of(app: Celery) -> dict[str, Any]:
    """Returns the app's ``broker_transport_options``."""
    return app.conf.broker_transport_options or {}


def visibility_timeout(app: Celery) -> float | None:
    """Returns the seconds after which an unacknowledged message is redelivered; None if never."""
    default = VISIBILITY_TIMEOUT.get(transport(app))
    if default is None:
        return None
    if has_predefined_queues(app):
        default = SQS_VISIBILITY_TIMEOUT
    return float(options_of(app).get("visibility_timeout") or default)


def redeliver_after(app: Celery) -> float | None:
    """Returns the seconds after which a dead worker's messages are redelivered.

    None if the broker decides.

    Raises:
        SettingsError: if ``idempotency_redeliver_after`` is not a valid number.
    """
    option = "idempotency_redeliver_after"
    seconds = app.conf.get(option, settings.DEFAULT_REDELIVER_AFTER)
    seconds = settings.check_value(option, seconds, "the Celery configuration")
    timeout = visibility_timeout(app)
    return None if seconds is None or timeout is None else min(float(seconds), timeout)


def has_predefined_queues(app: Celery) -> bool:
    """Returns whether the queues exist at Amazon already, so kombu does not configure them."""
    return transport(app) == "sqs" and bool(options_of(app).get("predefined_queues"))


def quorum_queues(app: Celery) -> list[Any]:
    """Returns the queues that the app declares as quorum queues."""
    return [
        queue
        for queue in app.amqp.queues.values()
        if (queue.queue_arguments or {}).get("x-queue-type") == "quorum"
    ]


def connection_error(app: Celery, timeout: float) -> str:
    """Returns the reason why the broker is unreachable, with its URL but no password; else "".

    Args:
        timeout: seconds that connecting may take.
    """
    try:
        connection = app.connection_for_write(connect_timeout=timeout)
    except Exception as error:  # quotes the URL
        return f"has a URL that kombu refuses ({type(error).__name__}): escape its password"

    def connect() -> str:
        try:
            with connection:
                connection.ensure_connection(max_retries=1, interval_start=0)
        except Exception as error:  # each transport has its own
            return f"{connection.as_uri()} cannot be reached: {error}"
        return ""

    return within(timeout, connect, f"{connection.as_uri()} does not reply")


def within(timeout: float, ask: Callable[[], T], otherwise: T) -> T:
    """Returns what `ask` returns within `timeout` seconds, else `otherwise`.

    It runs in a thread, because a broker may accept a connection and never reply.
    """
    found: list[T] = []
    thread = Thread(target=lambda: found.append(ask()), name="idempotency broker", daemon=True)
    thread.start()
    thread.join(timeout)
    return found[0] if found else otherwise
