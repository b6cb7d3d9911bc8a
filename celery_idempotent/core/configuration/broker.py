"""What the settings of the broker mean: when messages are redelivered, and where its Redis is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Thread
from typing import Any, TypeVar

from celery import Celery
from kombu.transport.base import Transport
from kombu.utils.url import url_to_parts

from celery_idempotent import settings
from celery_idempotent.core.store.config import SENTINEL_OPTIONS, chosen
from celery_idempotent.core.store.url import SENTINEL, server_urls, socket_url
from celery_idempotent.errors import SettingsError

T = TypeVar("T")

#: kombu's default visibility timeout of Redis, and those of other transports, in seconds.
REDIS_VISIBILITY_TIMEOUT = 3600.0
VISIBILITY_TIMEOUT = {"sqs": 1800.0}
#: Amazon's default in seconds, which applies to queues that kombu has not created.
SQS_VISIBILITY_TIMEOUT = 30.0

#: The ``broker_transport_options`` that also apply to the connections for records.
_CONNECTION_OPTIONS = ("socket_keepalive", "socket_keepalive_options", "client_name")
#: Transports of AMQP, which drops the properties of a message that it does not define.
AMQP = ("amqp", "qpid")


def connection(app: Celery) -> Any:
    """Returns kombu's connection, with the parameters that it has resolved; it is not open.

    Raises:
        SettingsError: if kombu refuses the URL.
    """
    try:
        connection = app.connection_for_read()
        connection.get_transport_cls()
    except Exception as error:  # quotes the URL
        raise SettingsError(
            f"broker_url cannot be used: kombu raises {type(error).__name__}"
        ) from None
    return connection


def location(connection: Any) -> tuple[str, dict[str, Any]]:
    """Returns the URL and the options of the records in a broker that is Redis.

    Args:
        connection: kombu's; it is not open.
    """
    transport, scheme = connection.get_transport_cls(), connection.transport_cls
    is_sentinel = scheme == SENTINEL
    if len(connection.alt) > 1 and not is_sentinel:
        raise SettingsError(
            "broker_url lists several servers, and the records must be on one: set "
            "idempotency_redis_url"
        )
    options = {
        "username": connection.userid,
        "password": connection.password,
        "credential_provider": getattr(connection, "credential_provider", None),  # kombu 5.5
        **chosen(connection.transport_options, _CONNECTION_OPTIONS),
    }
    host, port, db = connection.hostname, connection.port, connection.virtual_host
    if "://" in (host or ""):  # a Unix socket
        parts = url_to_parts(host)
        options |= {"username": parts.username, "password": parts.password, **parts.query}
        db = options.pop("virtual_host", db)
        return socket_url(f"/{parts.path}", _database(db)), options
    hosts = [(host, port)]
    if is_sentinel:
        options |= chosen(connection.transport_options, SENTINEL_OPTIONS)
        urls = map(url_to_parts, connection.alt)
        hosts = [(url.hostname, url.port) for url in urls] or hosts
    tls = isinstance(connection.ssl, Mapping) or scheme == "valkeys"
    if tls:
        options |= dict(connection.ssl or {}) | ({"ssl": True} if is_sentinel else {})
    hosts = [(host or "localhost", port or transport.default_port) for host, port in hosts]
    scheme = SENTINEL if is_sentinel else "rediss" if tls else "redis"
    return server_urls(scheme, hosts, _database(db)), options


def _database(virtual_host: Any) -> int:
    return int(str(virtual_host or "").strip("/") or 0)


def uses_redis(app: Celery) -> bool:
    """Returns whether the broker is Redis, or Valkey, with kombu's transport or another one."""
    return connection(app).get_transport_cls().driver_type in ("redis", "valkey")


def transport(app: Celery) -> str:
    """Returns the type of kombu's transport: ``redis``, ``amqp``, ``sqs`` …; else its name."""
    cls = _transport_class(app)
    is_kombus = cls.__module__.startswith("kombu.")
    return str(cls.driver_type if is_kombus else f"{cls.__module__}:{cls.__qualname__}")


def is_redis(app: Celery) -> bool:
    """Returns whether the transport is kombu's own for Redis, or derived from it."""
    # By the name of the module: a program that publishes to another broker need not import it.
    return "kombu.transport.redis" in {cls.__module__ for cls in _transport_class(app).__mro__}


def _transport_class(app: Celery) -> Any:
    try:
        return connection(app).get_transport_cls()
    except SettingsError:
        return Transport  # the worker will not start


def acknowledges(app: Celery) -> bool:
    """Returns whether the transport keeps messages until they are acknowledged."""
    return not is_redis(app) or bool(options_of(app).get("ack_emulation", True))


def options_of(app: Celery) -> dict[str, Any]:
    """Returns the app's ``broker_transport_options``."""
    return app.conf.broker_transport_options or {}


def visibility_timeout(app: Celery) -> float | None:
    """Returns the seconds after which an unacknowledged message is redelivered; None if never."""
    default = REDIS_VISIBILITY_TIMEOUT if is_redis(app) else VISIBILITY_TIMEOUT.get(transport(app))
    if default is None or not acknowledges(app):
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


def describe_redelivery(app: Celery) -> str:
    """Returns when the messages of a dead worker are redelivered."""
    seconds, timeout = redeliver_after(app), visibility_timeout(app)
    if seconds is not None:
        return f"{seconds:g} s after its death (idempotency_redeliver_after)"
    if timeout is not None:
        return f"{timeout:g} s after their delivery (visibility_timeout)"
    if not acknowledges(app):
        return "never (ack_emulation is off)"
    if transport(app) in AMQP:
        return "when the broker notices that its connection is lost"
    return f"as the transport {transport(app)!r} decides, without idempotency_redeliver_after"


def has_predefined_queues(app: Celery) -> bool:
    """Returns whether the queues exist at Amazon already, so kombu does not configure them."""
    return transport(app) == "sqs" and bool(options_of(app).get("predefined_queues"))


def unacknowledged_queues(app: Celery) -> list[str]:
    """Returns the names of the queues whose messages are gone once a worker has received them."""
    names = (name for name, queue in app.amqp.queues.items() if queue.no_ack)
    return list(names) if acknowledges(app) else list(app.amqp.queues)


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


def within(timeout: float, request: Callable[[], T], otherwise: T) -> T:
    """Returns what `request` returns within `timeout` seconds, else `otherwise`.

    It runs in a thread, because a broker may accept a connection and never reply.
    """
    found: list[T] = []
    thread = Thread(target=lambda: found.append(request()), name="idempotency broker", daemon=True)
    thread.start()
    thread.join(timeout)
    return found[0] if found else otherwise
