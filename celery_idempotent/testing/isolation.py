"""Isolates the records of a test on a test server, under a prefix of their own."""

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
from celery_idempotent.settings import PREFIX, SHADOW_SUFFIX
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.run_sync import run_sync
from celery_idempotent.task.task import IdempotentTask

#: Options that do not apply to a test server, which has no replicas.
_DEPLOYMENT_OPTIONS = ("redis_url", "redis_client", "redis_options", "wait_replicas")


@contextmanager
def isolated_stores(url: str) -> Iterator[str]:
    """Moves the records of this process to the server at `url`, and yields their prefix.

    This applies to every app, task and engine, existing or created later, regardless of its
    configuration: tests never connect to the configured Redis. ``idempotency_enabled=False`` in an
    app's settings is ignored, but not as an attribute of a task. Afterwards, all use their own
    records again.

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
            if option.removeprefix(PREFIX) not in _DEPLOYMENT_OPTIONS and not is_disabled_by_app:
                yield option, value
        yield "idempotency_redis_url", url

    configured_values = configuration._values_of  # noqa: SLF001
    with ExitStack() as stack:
        stack.enter_context(_all_stores(isolated))
        stack.callback(_forget_configurations)
        stack.enter_context(patch.object(configuration, "_values_of", values_of))
        _forget_configurations()
        yield prefix


@contextmanager
def _all_stores(isolated: Callable[[StoreConfig], StoreConfig]) -> Iterator[None]:
    """Replaces the config of each store, existing or created later, and finally restores it.

    Stores stay the same objects, because tasks and engines refer to them.
    """
    original = RecordStore.__init__
    before: dict[RecordStore, dict[str, Any]] = {}
    arguments: dict[RecordStore, Any] = {}

    def init(
        store: RecordStore,
        config: StoreConfig,
        decode: Callable[[Record], Any],
        *,
        is_async: bool = False,
    ) -> None:
        arguments.setdefault(store, (config, decode, is_async))  # isolations may be nested
        original(store, isolated(config), decode, is_async=is_async)

    for store in list(RecordStore.instances):
        before[store] = vars(store).copy()
        vars(store).clear()
        old = before[store]
        init(store, old["config"], old["decode"], is_async=old["is_async"])
    try:
        with patch.object(RecordStore, "__init__", init):
            yield
    finally:
        for store, (config, decode, is_async) in arguments.items():
            # An event loop closes its own connections when it ends.
            if not is_async:
                run_sync(store.aclose())
            vars(store).clear()
            if store in before:
                vars(store).update(before[store])
            else:
                original(store, config, decode, is_async=is_async)


def _forget_configurations() -> None:
    """Makes all tasks read their settings again instead of using cached ones."""
    classes: list[type[Any]] = [IdempotentTask]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        cls._configuration = None
