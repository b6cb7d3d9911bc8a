"""Chooses the Redis for a task's records: configured, else the result backend, else the broker."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from celery import Celery
from kombu.utils.imports import symbol_by_name

from celery_idempotent.errors import SettingsError
from celery_idempotent.settings import Settings
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.url import is_redis_url

#: Celery's transport options that concern connections; the others concern messages.
_CONNECTION_OPTIONS = (
    *("master_name", "sentinel_kwargs", "min_other_sentinels", "credential_provider"),
    *("socket_keepalive", "socket_keepalive_options", "client_name"),
)


def store_config_of(app: Celery | None, options: Settings) -> StoreConfig:
    """Returns the store configuration for these `options`.

    Args:
        app: None for callers without an app, whose options must name a server.

    Raises:
        SettingsError: if no setting names a Redis server, or a setting is invalid.
    """
    url, inherited = ("", {}) if options.redis_client else _url_and_options(app, options)
    client = options.redis_client
    if isinstance(client, str):
        try:
            client = symbol_by_name(client)
        except (ImportError, AttributeError, ValueError) as error:
            raise SettingsError(
                f"idempotency_redis_client {client!r} cannot be imported: {type(error).__name__}"
            ) from None
    return StoreConfig(
        url=url,
        prefix=options.key_prefix,
        options=inherited if options.redis_options is None else options.redis_options,
        client=client,
        timeout=options.redis_timeout,
        wait_replicas=options.wait_replicas,
    )


def _url_and_options(app: Celery | None, options: Settings) -> tuple[str, Mapping[str, Any]]:
    if options.redis_url is not None:
        return options.redis_url, {}
    for url, transport, tls in _candidates(app) if app else ():
        if is_redis_url(url):
            inherited = {n: v for n, v in (transport or {}).items() if n in _CONNECTION_OPTIONS}
            if not tls:
                return str(url), inherited
            inherited |= {"ssl": True} if str(url).startswith("sentinel:") else {}
            inherited |= tls if isinstance(tls, Mapping) else {}
            return re.sub("^redis://", "rediss://", str(url)), inherited
    raise SettingsError(
        "idempotency_redis_url is not set, and neither the result backend nor the broker is "
        "Redis: set it to the URL of the Redis server for the records"
    )


def _candidates(app: Celery) -> Iterator[tuple[Any, Any, Any]]:
    """Yields URL, transport options and TLS options of the result backend and of the broker."""
    conf = app.conf
    yield conf.result_backend, conf.result_backend_transport_options, conf.redis_backend_use_ssl
    yield conf.broker_read_url, conf.broker_transport_options, conf.broker_use_ssl
