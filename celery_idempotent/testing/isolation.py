"""Isolates the records of a test: on a server for tests, under a prefix that no other test has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch
from uuid import uuid4

from celery import Celery, Task

from celery_idempotent.configuration import configuration
from celery_idempotent.record.record import Record
from celery_idempotent.settings import SHADOW_SUFFIX
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.run_sync import run_sync
from celery_idempotent.task.task import IdempotentTask

#: The user's options that do not apply to a server for tests, which has no replicas.
_DEPLOYMENT_OPTIONS = frozenset(
    f"idempotency_{name}"
    for name in ("redis_url", "redis_client", "redis_options", "wait_replicas")
)


@contextmanager
def isolated_stores(url: str) -> Iterator[str]:
    """Moves the records of this process to the server at `url`, and yields their prefix.

    This applies to every app, task and engine, whether it exists already or not, and whatever
    Redis it is configured for: nothing else is connected to. ``idempotency_enabled=False`` in an
    app's settings is ignored; as an attribute of a task it is not. Afterwards all of them continue
    where they were.

    Args:
        url: as idempotency_redis_url.
    """
    prefix = f"test-{uuid4().hex}"

    def isolated(config: StoreConfig) -> StoreConfig:
        suffix = SHADOW_SUFFIX if config.prefix.endswith(SHADOW_SUFFIX) else ""
        return replace(
            config,
            url=url,
            prefix=prefix + suffix,
            options={},
            client=None,
            wait_replicas=0,
        )

    def values_of(task: type[Task], app: Celery) -> Iterator[tuple[str, Any]]:
        for option, value in configured_values(task, app):
            is_disabled_by_app = option == "idempotency_enabled" and getattr(task, option) is None
            if option not in _DEPLOYMENT_OPTIONS and not is_disabled_by_app:
                yield option, value
        yield "idempotency_redis_url", url

    configured_values = configuration._values_of  # noqa: SLF001
    with ExitStack() as stack:
        for store in list(RecordStore.instances):
            stack.enter_context(_replaced(store, isolated(store.config)))
        stack.enter_context(_new_stores(isolated))
        stack.callback(_forget_configurations)
        stack.enter_context(patch.object(configuration, "_values_of", values_of))
        _forget_configurations()
        yield prefix


@contextmanager
def _replaced(store: RecordStore, config: StoreConfig) -> Iterator[None]:
    """Lets `store`, which tasks and engines refer to, continue as one with this `config`."""
    attributes = vars(store).copy()
    _reset(store, config)
    try:
        yield
    finally:
        _close(store)
        vars(store).clear()
        vars(store).update(attributes)


@contextmanager
def _new_stores(isolated: Callable[[StoreConfig], StoreConfig]) -> Iterator[None]:
    """Changes the config of each store that is created; afterwards each gets its own config."""
    original = RecordStore.__init__
    configs: dict[RecordStore, StoreConfig] = {}

    def init(
        store: RecordStore,
        config: StoreConfig,
        decode: Callable[[Record], Any],
        *,
        is_async: bool = False,
    ) -> None:
        configs[store] = config
        original(store, isolated(config), decode, is_async=is_async)

    with patch.object(RecordStore, "__init__", init):
        yield
    for store, config in configs.items():
        _close(store)
        _reset(store, config)


def _reset(store: RecordStore, config: StoreConfig) -> None:
    decode, is_async = store._decode, store.is_async  # noqa: SLF001
    vars(store).clear()
    RecordStore.__init__(store, config, decode, is_async=is_async)


def _close(store: RecordStore) -> None:
    """Closes the connections of blocking code; an event loop closes its own when it ends."""
    if not store.is_async:
        run_sync(store.aclose())


def _forget_configurations() -> None:
    """Lets all tasks read their settings again, in place of those that they have cached."""
    classes: list[type[Any]] = [IdempotentTask]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        cls._configuration = None
