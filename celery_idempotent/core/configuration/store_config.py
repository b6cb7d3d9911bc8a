"""Chooses the Redis for a task's records: configured, else the result backend, else the broker.

The parameters of a result backend or a broker are taken from Celery and kombu, which have already
resolved them from all of their settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from celery import Celery
from kombu.utils.imports import symbol_by_name
from kombu.utils.url import url_to_parts

from celery_idempotent.core.store.config import SENTINEL_OPTIONS, StoreConfig, chosen
from celery_idempotent.core.store.url import SENTINEL, check, parts_of, server_urls, socket_url
from celery_idempotent.errors import SettingsError
from celery_idempotent.settings import Settings, imported

#: Parameters of a result backend that are not copied: here they are in the URL, or are set
#: otherwise.
_NOT_OPTIONS = (
    *("host", "port", "path", "db", "hosts", "connection_class", "decode_responses"),
    *("max_connections", "socket_timeout", "socket_connect_timeout", "retry_on_timeout"),
    *("driver_info", "lib_name", "lib_version"),
)


def check_location(settings: Settings) -> None:
    """Rejects a URL that names no Redis server.

    Raises:
        SettingsError: as :func:`.url.check`.
    """
    if settings.redis_url is not None:
        check(settings.redis_url, settings.redis_options or {})


def store_config_of(app: Celery | None, settings: Settings) -> StoreConfig:
    """Returns the store configuration for these `settings`.

    Args:
        app: None for callers without an app, whose settings must name a server.

    Raises:
        SettingsError: if no setting names a Redis server, or a setting is invalid.
    """
    url, inherited = ("", {}) if settings.redis_client else _url_and_options(app, settings)
    client = settings.redis_client
    if isinstance(client, str):
        client = imported("idempotency_redis_client", client)
    return StoreConfig(
        url=url,
        prefix=settings.key_prefix,
        options=_with_provider({**inherited, **(settings.redis_options or {})}),
        client=client,
        timeout=settings.redis_timeout,
        wait_replicas=settings.wait_replicas,
    )


def _url_and_options(app: Celery | None, settings: Settings) -> tuple[str, dict[str, Any]]:
    if settings.redis_url is not None:
        query: Mapping[str, Any] = {}
        with suppress(ValueError):  # the URL is invalid, which the store will report
            query = url_to_parts(next(iter(parts_of(settings.redis_url)), "")).query
        return settings.redis_url, chosen(query, ("credential_provider",))
    if app and (backend := _redis_backend(app)):
        return _of_backend(backend, app.conf.result_backend_transport_options or {})
    if app:
        from celery_idempotent.core.configuration import broker

        try:
            if broker.uses_redis(app):
                return broker.location(broker.connection(app))
        except SettingsError:
            raise
        except ValueError:  # quotes the URL
            raise SettingsError("broker_url has an invalid port or database") from None
    raise SettingsError(
        "idempotency_redis_url is not set, and neither the result backend nor the broker is "
        "Redis: set it to the URL of the Redis server for the records"
    )


def _redis_backend(app: Celery) -> Any:
    """Returns the app's result backend if it is Celery's for Redis; else None."""
    named = app.backend_cls or app.conf.result_backend
    scheme = str(named or "").partition("://")[0].partition("+")[0]
    # Reading `app.backend` imports it. Any other backend is left alone, since Django may not be
    # ready.
    if not scheme.startswith(("redis", "sentinel", "valkey")) and "." not in scheme:
        return None
    from celery.backends.redis import RedisBackend

    try:
        backend = app.backend
    except Exception as error:  # quotes the URL
        hint = "; for Valkey write redis://" if scheme.startswith("valkey") else ""
        raise SettingsError(
            f"result_backend cannot be used: Celery raises {type(error).__name__}{hint}"
        ) from None
    return backend if isinstance(backend, RedisBackend) else None


def _of_backend(backend: Any, transport: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the URL and the options of the Redis of a result backend."""
    given = {name: value for name, value in backend.connparams.items() if value is not None}
    options = {name: value for name, value in given.items() if name not in _NOT_OPTIONS}
    connection_class, db = given.get("connection_class"), given.get("db", 0)
    if "path" in given:
        return socket_url(given["path"], db), options
    tls = connection_class and issubclass(connection_class, backend.connection_class_ssl)
    if connection_class and not tls:
        raise SettingsError(
            f"the result backend's connections are of the class {connection_class.__qualname__}: "
            "set idempotency_redis_url or idempotency_redis_client for the records"
        )
    hosts = [(each["host"], each["port"]) for each in given.get("hosts", ())]
    if hosts:
        options |= chosen(transport, SENTINEL_OPTIONS) | ({"ssl": True} if tls else {})
        return server_urls(SENTINEL, hosts, db), options
    return server_urls("rediss" if tls else "redis", [(given["host"], given["port"])], db), options


def _with_provider(options: dict[str, Any]) -> dict[str, Any]:
    """Returns `options` without None; a credential provider replaces user and password."""
    options = {name: value for name, value in options.items() if value is not None}
    provider = options.get("credential_provider")
    if isinstance(provider, str):
        try:
            options["credential_provider"] = symbol_by_name(provider)()
        except Exception as error:
            raise SettingsError(
                f"credential_provider {provider!r} cannot be created: {type(error).__name__}"
            ) from None
    for name in ("username", "password") if provider else ():
        options.pop(name, None)
    return options
