"""The records of one test: isolated under a prefix of their own, with simulated crashes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from uuid import uuid4

from celery import Celery, Task

from celery_idempotent import signals
from celery_idempotent.core.configuration import configuration
from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Record, State
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.task.task import IdempotentTask
from celery_idempotent.extensions.shadow import SHADOW_SUFFIX
from celery_idempotent.settings import PREFIX
from celery_idempotent.testing.server import RedisServer

if TYPE_CHECKING:
    from unittest import TestCase as _TestCase
else:
    _TestCase = object

#: Options of the configured Redis, which the test server replaces (it has no replicas either).
_DEPLOYMENT_OPTIONS = ("redis_url", "redis_client", "redis_options", "wait_replicas")
#: The task id in the records that `IsolatedRecords.crash` stores.
_CRASHED_TASK = "crashed-task"


@cache
def private_server() -> RedisServer:
    """Starts the server of this process at the first call; it ends with the process."""
    return RedisServer()


@contextmanager
def isolated_records(url: str | None = None) -> Iterator[IsolatedRecords]:
    """Isolates the records of all tasks and engines of this process until the block ends.

    Args:
        url: a test server; None for a private server, which starts at first use.

    Raises:
        RedisServerError: no server is installed; the message says how to install one.
    """
    url = url or private_server().url
    executions: Counter[str] = Counter()

    def count(key: str, **_: Any) -> None:
        executions[key] += 1

    with _isolated_stores(url) as prefix:
        signals.begun.connect(count, weak=False)
        try:
            yield IsolatedRecords(url, prefix, executions)
        finally:
            signals.begun.disconnect(count)


class IsolatedRecords:
    """The records of one test. Methods name a call by its task and its arguments.

    Attributes:
        settings: Celery settings with which a worker in another process uses the same records.
    """

    def __init__(self, url: str, prefix: str, executions: Counter[str]) -> None:
        self.settings: dict[str, Any] = {
            "idempotency_enabled": True,
            "idempotency_redis_url": url,
            "idempotency_key_prefix": prefix,
        }
        self._executions = executions

    def expire_lease(self, task: IdempotentTask, *args: Any, **kwargs: Any) -> None:
        """Ends the lease of the running execution, as if its process had been frozen.

        The next begin takes over; the outcome of the first execution is then rejected.

        Raises:
            AssertionError: if the call is not running.
        """
        __tracebackhide__ = True
        record = task.idempotency_record(*args, **kwargs)
        if record is None or record.state is not State.STARTED:
            state = "absent" if record is None else record.state.value
            raise AssertionError(f"{task.name} is {state} for these arguments: it has no lease")
        key = _record_key(task, record.task_id, args, kwargs)
        task.idempotency_configuration.execute(
            commands.abandon(key, record.task_id, record.worker, grace_ms=0, reason="")
        )

    def crash(self, task: IdempotentTask, *args: Any, **kwargs: Any) -> None:
        """Stores the record that a crash during this call leaves: STARTED, the lease expired.

        Raises:
            AssertionError: if the call cannot begin: it has finished, is running or is reserved.
        """
        __tracebackhide__ = True
        settings = task.idempotency_configuration.settings
        key = _record_key(task, _CRASHED_TASK, args, kwargs)
        reply = task.idempotency_configuration.execute(
            commands.begin(
                key,
                execution_id=b"crashed.",
                task_id=_CRASHED_TASK,
                worker="crashed-worker/0",
                lease_ms=settings.lease_ms,
                retention_ms=settings.result_ms,
                hold_ms=settings.hold_ms,
            )
        )
        if reply.case != "begun":
            raise AssertionError(
                f"{task.name} cannot crash: begin replied {reply.case!r} for these arguments"
            )
        self._executions[str(key)] += 1
        self.expire_lease(task, *args, **kwargs)

    def executions(self, task: IdempotentTask, *args: Any, **kwargs: Any) -> int:
        """Returns how many executions of this call have begun in this test.

        Executions of this process are counted (an eager app, or a worker in a thread). For those of
        other processes, the record's `attempt` is used: 1, plus those that died in a row.
        """
        record = task.idempotency_record(*args, **kwargs)
        key = str(task.idempotency_key_of(*args, **kwargs))
        return max(self._executions[key], 0 if record is None else record.attempt)

    def assert_ran_once(self, task: IdempotentTask, *args: Any, **kwargs: Any) -> None:
        """Asserts that this call has completed in this test, after exactly one execution.

        Raises:
            AssertionError: with the state of the call and the number of its :meth:`executions`.
        """
        __tracebackhide__ = True  # pytest shows the line of the test
        configuration = task.idempotency_configuration
        if configuration.in_shadow or not configuration.is_protected:
            option = "shadow is True" if configuration.in_shadow else "enabled is False"
            raise AssertionError(f"{task.name}: idempotency_{option}, so duplicates run as well")
        record = task.idempotency_record(*args, **kwargs)
        state = "absent" if record is None else record.state.value
        executions = self.executions(task, *args, **kwargs)
        if state != "COMPLETED" or executions != 1:
            raise AssertionError(
                f"{task.name} is {state} after {executions} executions, not COMPLETED after one"
            )


class IdempotencyTestMixin(_TestCase):
    """Isolates the records of each test: ``class ChargeTest(IdempotencyTestMixin, TestCase)``.

    It does for unittest and Django what the fixtures of the pytest plugin do.

    Attributes:
        idempotency: the records of the test, like the fixture of the same name.
        idempotency_redis_url: a test server; None for a private server.
    """

    idempotency: IsolatedRecords
    idempotency_redis_url: str | None = None

    def setUp(self) -> None:
        """Isolates the records; a subclass with its own setUp must call this one first."""
        stack = ExitStack()
        self.idempotency = stack.enter_context(isolated_records(self.idempotency_redis_url))
        self.addCleanup(stack.close)
        super().setUp()


def _record_key(
    task: IdempotentTask, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Key:
    """Returns the key of the record of the execution `task_id`."""
    key = task.idempotency_key_of(*args, **kwargs)
    return task.idempotency_configuration.record_key(key, task_id)


@contextmanager
def _isolated_stores(url: str) -> Iterator[str]:
    """Moves the records of this process to the server at `url`, and yields their prefix.

    This applies to every app, task and engine, existing or created later, regardless of its
    configuration: tests never connect to the configured Redis. ``idempotency_enabled=False`` in an
    app's settings is ignored for tasks without that attribute. Afterwards, all use their own
    records again.

    Args:
        url: as idempotency_redis_url.
    """
    prefix = f"test-{uuid4().hex}"

    def isolated(config: StoreConfig) -> StoreConfig:
        suffix = SHADOW_SUFFIX if config.prefix.endswith(SHADOW_SUFFIX) else ""
        return replace(
            config, url=url, prefix=prefix + suffix, options={}, client=None, wait_replicas=0
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
        view: Callable[[Record], Any] | None = None,
        *,
        is_async: bool = False,
    ) -> None:
        # Isolations may be nested: the first arguments are the ones to restore.
        arguments.setdefault(store, (config, decode, view, is_async))
        original(store, isolated(config), decode, view, is_async=is_async)

    for store in list(RecordStore.instances):
        before[store] = vars(store).copy()
        vars(store).clear()
        old = before[store]
        init(store, old["config"], old["decode"], old["view"], is_async=old["is_async"])
    try:
        with patch.object(RecordStore, "__init__", init):
            yield
    finally:
        for store, (config, decode, view, is_async) in arguments.items():
            # An event loop closes its own connections when it ends.
            if not is_async:
                run_sync(store.aclose())
            vars(store).clear()
            if store in before:
                vars(store).update(before[store])
            else:
                original(store, config, decode, view, is_async=is_async)


def _forget_configurations() -> None:
    """Makes all tasks read their settings again instead of using cached ones."""
    classes: list[type[Any]] = [IdempotentTask]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        cls._configurations = {}
