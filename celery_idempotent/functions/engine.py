"""The engine: `Idempotency`, the API for functions, blocks and batches.

It turns options into settings and keys into calls; `direct_call`, `block` and `batch` run them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from functools import cached_property, partial, wraps
from typing import Any, TypeVar, overload

from celery import Celery, Task
from kombu.serialization import registry

from celery_idempotent import settings
from celery_idempotent.core.configuration import app_tasks, configuration
from celery_idempotent.core.configuration.store_config import store_config_of
from celery_idempotent.core.events.report import CallIdentity, report_refused
from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.conflict import POLICIES
from celery_idempotent.core.flow.execution import BaseExecution, unprotected
from celery_idempotent.core.flow.extension import run_unprotected
from celery_idempotent.core.flow.flow import execute
from celery_idempotent.core.flow.host import CallData
from celery_idempotent.core.flow.thread import Executor, run_flow
from celery_idempotent.core.flow.values import restored
from celery_idempotent.core.key import KEY_OPTION, KINDS, Key, fingerprint_of
from celery_idempotent.core.key.canonical import NotCanonicalError, canonical
from celery_idempotent.core.key.rule import TASK_ID, KeyRule
from celery_idempotent.core.payload.codec import PayloadCodec
from celery_idempotent.core.payload.result_codec import ResultCodec
from celery_idempotent.core.payload.value_codec import ValueCodec
from celery_idempotent.core.printable import printable
from celery_idempotent.core.record import Record, State
from celery_idempotent.core.store import run_sync
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.server_info import distinct
from celery_idempotent.errors import IdempotencyError, KeyRuleError, SettingsError
from celery_idempotent.extensions.label import Label
from celery_idempotent.functions.aio import AsyncExecutor, AsyncioRuntime
from celery_idempotent.functions.batch import AsyncBatch, Batch
from celery_idempotent.functions.block import (
    AsyncBlockExecution,
    BlockExecution,
)
from celery_idempotent.functions.direct_call import (
    AsyncDirectHost,
    DirectHost,
    await_as_current,
    current_execution,
    direct_call,
    outcome_of,
    run_as_current,
)
from celery_idempotent.operations.records.query import records
from celery_idempotent.settings import PREFIX, Settings
from celery_idempotent.unknown_option import unknown_option

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_NAME = "calls"

#: The values of policies that apply outside tasks; the others need a message.
_ALLOWED_POLICIES = {
    "on_conflict": tuple(name for name, policy in POLICIES.items() if policy.functions),
    "on_store_error": ("raise", "run"),
    "until": ("expired", "finished"),
}
#: Options that only a task has, and all others.
_TASK_OPTIONS = settings.in_scope("task")
_OPTIONS = tuple(field.name for field in fields(Settings) if field.name not in _TASK_OPTIONS)
#: Options of the engine that a function or a block cannot override.
_STORE_OPTIONS = settings.in_scope("engine")


class Idempotency:
    """Makes functions, code blocks, batches and message handlers idempotent.

    Args:
        app_or_redis: a Celery app, whose settings become the defaults; a Redis URL; or a client of
            redis-py for blocking code or of redis.asyncio for coroutines.
        name: replaces the task name in the keys and records of blocks, batches and messages.
        options: the options of a task, without ``idempotency_``; durations in seconds, sizes in
            bytes.

    Raises:
        SettingsError: for the first invalid option, in one line.
    """

    def __init__(self, app_or_redis: Any, /, *, name: str = DEFAULT_NAME, **options: Any) -> None:
        self.app = app_or_redis if isinstance(app_or_redis, Celery) else None
        self.name = name
        #: The code objects of the decorated functions, by name: two functions must not share one.
        self._functions: dict[str, Any] = {}
        #: The engine's options by name. Those from the app's configuration have the full names of
        #: its settings (``idempotency_…``), because an error about one should name the setting.
        self._values: dict[str, Any] = {"on_conflict": "wait", "on_store_error": "raise"}
        if self.app is not None:
            configuration.check_option_names(self.app)
            self._values |= _configured_options(self.app)
        elif isinstance(app_or_redis, str):
            self._values["redis_url"] = app_or_redis
        else:
            self._values["redis_client"] = app_or_redis
        #: The content types that may be decoded: those of the app; without one, only that of the
        #: engine's serializer.
        self._accept = (
            configuration.accepted_content_types(self.app)
            if self.app is not None
            else frozenset({registry.name_to_type.get(options.get("serializer") or "json", "")})
        )
        self.settings = self._build(options, f"Idempotency {name!r}")
        self._values = self._overridden(options)
        self._store_config = store_config_of(self.app, self.settings)
        self._rule = KeyRule(name, None, inspect.Signature(), lambda args, kwargs: (args, kwargs))

    @overload
    def idempotent(self, func: F, /) -> F: ...

    @overload
    def idempotent(
        self,
        /,
        *,
        key: Any = None,
        name: str | None = None,
        label: str | None = None,
        **options: Any,
    ) -> Callable[[F], F]: ...

    def idempotent(
        self,
        func: F | None = None,
        /,
        *,
        key: Any = None,
        name: str | None = None,
        label: str | None = None,
        **options: Any,
    ) -> Any:
        """Decorates a function or coroutine function; duplicate calls get the first one's outcome.

        A call whose key is held waits up to ``wait_timeout`` seconds for the outcome, then raises
        ConflictError; with ``on_conflict="raise"`` it raises at once. Waiting coroutines do not
        block their thread.

        Args:
            key: the key rule, as for tasks: None for all arguments, a template, a tuple of
                argument names, or a callable.
            name: the function's name in keys and records; by default its module and qualified
                name, so moving the function changes its keys. Required for a lambda, a function
                inside another one and a callable object. Functions that differ only in their
                closures need different names.
            label: a template, as for tasks.
            options: override the engine's options for this function.

        Raises:
            SettingsError: for the first invalid option, in one line.
        """
        decorate = partial(self._wrap, name, key, label, options)
        return decorate if func is None else decorate(func)

    def _wrap(
        self,
        name: str | None,
        key: Any,
        label: str | None,
        options: Mapping[str, Any],
        func: Callable[..., Any],
    ) -> Callable[..., Any]:
        """Returns the function that :meth:`idempotent` puts in the place of `func`."""
        if isinstance(func, Task):
            raise SettingsError(
                f"{func.name} is a Celery task, whose messages would run unprotected: remove "
                f"@idempotent(), and set base=IdempotentTask and {KEY_OPTION} in its decorator"
            )
        name = self._name_of(func, name)
        own_settings = self.settings_for(options, name)
        if key is TASK_ID:
            raise SettingsError(
                f"{name}: the key TASK_ID is for tasks only; a function call has no message"
            )
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise SettingsError(
                f"{name} is a generator function, whose values cannot be replayed; return a list"
            )
        extensions = own_settings.extensions
        blocking = _blocking_option(own_settings)
        if blocking and inspect.iscoroutinefunction(func):
            raise SettingsError(
                f"{name}: {blocking} needs a blocking function, since its connection blocks; make "
                "it blocking, and call it with asyncio.to_thread"
            )
        # Arguments are not normalised, because no serializer is between caller and function.
        rule = KeyRule(name, key, inspect.signature(func), lambda args, kwargs: (args, kwargs))
        first = next(iter(rule.signature.parameters), None)
        if key is not None and first in ("self", "cls") and first not in (rule.names or [first]):
            raise SettingsError(
                f"{name} is a method, and its key leaves out {first}: objects of all classes would "
                f"share its outcomes; use {first} in the key, or pass a function as the key"
            )
        labels = None if label is None else Label(rule, label)
        # A codec of its own: creating that of the executor may read secrets, which is too early
        # when a module is imported.
        values = ValueCodec(self.app, self._accept)

        def as_stored(value: Any) -> Any:
            """Returns `value` as a call with a record would return it."""
            return restored(value, own_settings, values, key=name)[1].get()

        def new_call(
            host_class: type[DirectHost], runtime: Any, codec: PayloadCodec, args: Any, kwargs: Any
        ) -> Call:
            label = labels.of(args, kwargs) if labels else ""
            try:
                key = rule.derive(args, kwargs)
            except KeyRuleError as error:
                report_refused(CallIdentity(func, name, ""), error)
                raise
            data = direct_call(func, key, own_settings, label)
            work = partial(func, *args, **kwargs)
            difference = partial(rule.difference, args, kwargs, key)
            host = host_class(data, work, self.app, difference)
            return Call(data, host, runtime, codec, extensions)

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            if not own_settings.enabled:
                work = partial(func, *args, **kwargs)
                return as_stored(await await_as_current(unprotected(), work))
            runtime, codec = AsyncioRuntime(self.async_executor.store), self.async_executor.codec
            call = new_call(AsyncDirectHost, runtime, codec, args, kwargs)
            return outcome_of(call, await runtime.drive(execute(call))).get()

        def call_blocking(*args: Any, **kwargs: Any) -> Any:
            if not own_settings.enabled:
                execution, work = unprotected(), partial(func, *args, **kwargs)
                work = partial(run_as_current, execution, work)
                return as_stored(run_unprotected(own_settings, execution, work))
            executor = self.executor
            call = new_call(DirectHost, executor.runtime, executor.codec, args, kwargs)
            return outcome_of(call, run_flow(partial(execute, call))).get()

        wrapper: Any = call_async if inspect.iscoroutinefunction(func) else call_blocking
        wrapper = wraps(func)(wrapper)
        wrapper.idempotency_key_of = lambda *args, **kwargs: rule.find(args, kwargs)
        return wrapper  # type: ignore[no-any-return]

    def _name_of(self, func: Callable[..., Any], name: str | None) -> str:
        """Returns the name of a function, which no other function of the engine may have."""
        if not name:
            if not hasattr(func, "__qualname__"):
                raise SettingsError(f"a {type(func).__name__} has no name of its own; pass name=")
            name = f"{func.__module__}.{func.__qualname__}"
            if "<" in func.__qualname__ or hasattr(func, "__self__"):
                raise SettingsError(
                    f"{name} is not unique, since other inner functions or bound methods have this "
                    "name too; pass name="
                )
        original: Any = inspect.unwrap(func)
        is_bound = hasattr(original, "__self__")
        code = original if is_bound else getattr(original, "__code__", original)
        if self._functions.setdefault(name, code) != code:
            raise SettingsError(
                f"two functions are named {name}, and would get each other's outcomes; pass "
                "another name="
            )
        return name

    def execution(
        self, key: Any, *, fingerprint: Any = None, label: str = "", **options: Any
    ) -> Block:
        """Returns the context manager of a code block, for ``with`` or ``async with``.

        Args:
            key: as in :meth:`key_of`.
            fingerprint: as in :meth:`key_of`.
            label: readable text, stored and shown beside the key.
            options: override the engine's options for this block.

        Raises:
            SettingsError: for the first invalid option, in one line.
            KeyRuleError: if `key` cannot be used as a key.
        """
        block_settings = self.settings_for(options, self.name)
        try:
            derived = self.key_of(key, fingerprint)
        except KeyRuleError as error:
            report_refused(CallIdentity(self, self.name, ""), error)
            raise
        return Block(self, derived, block_settings, printable(str(label)))

    def begin_many(
        self, keys: Sequence[Hashable], fingerprints: Sequence[Any] | None = None
    ) -> Batch:
        """Begins all `keys` in one round trip, and renews the leases of those to run.

        A problem with one key, its fingerprint or its record becomes the error of its entry.

        Args:
            keys: hashable keys, each as in :meth:`key_of`.
            fingerprints: one for each key.

        Raises:
            ValueError: if there are more or fewer fingerprints than keys.
            StoreUnavailableError: if Redis is unavailable and ``on_store_error`` is ``raise``.
            SettingsError: if ``transaction`` or ``wait_replicas`` is set.
        """
        calls = self._calls(keys, fingerprints)
        runtime, codec = self.executor.runtime, self.executor.codec
        batch = Batch(runtime, codec, keys, calls)
        run_sync(batch._begin_all())  # noqa: SLF001
        return batch

    async def abegin_many(
        self, keys: Sequence[Hashable], fingerprints: Sequence[Any] | None = None
    ) -> AsyncBatch:
        """As :meth:`begin_many`, for coroutines."""
        calls = self._calls(keys, fingerprints)
        executor = self.async_executor
        batch = AsyncBatch(AsyncioRuntime(executor.store), executor.codec, keys, calls)
        await batch._begin_all()  # noqa: SLF001
        return batch

    def _calls(
        self, keys: Sequence[Hashable], fingerprints: Sequence[Any] | None
    ) -> list[CallData | IdempotencyError]:
        """Returns the data of the call of each key, or the error that refuses the key."""
        if blocking := _blocking_option(self.settings):
            raise SettingsError(
                f"Idempotency {self.name!r}: a batch has no {blocking}; use a block, with "
                "idem.execution(key), for each key"
            )
        if self._store_config.wait_replicas:
            raise SettingsError(
                f"Idempotency {self.name!r}: a batch does not wait for replicas; remove "
                "idempotency_wait_replicas, or begin each key by itself"
            )
        if fingerprints is None:
            fingerprints = [None] * len(keys)
        if len(fingerprints) != len(keys):
            raise ValueError(
                f"Idempotency {self.name!r}: {len(keys)} keys need as many fingerprints, not "
                f"{len(fingerprints)}"
            )
        return [*map(self._call, keys, fingerprints)]

    def _call(self, key: Hashable, fingerprint: Any) -> CallData | IdempotencyError:
        try:
            hash(key)
        except Exception:
            return KeyRuleError(
                f"{self.name}: a key of a batch is a {type(key).__qualname__}, which cannot be "
                f"hashed; it must be {KINDS}"
            )
        try:
            return direct_call(self, self.key_of(key, fingerprint), self.settings)
        except KeyRuleError as error:
            return error

    @property
    def current(self) -> BaseExecution:
        """The current execution, with its key, token and steps, for the code of its body."""
        return current_execution.get() or unprotected()

    def key_of(self, key: Any, fingerprint: Any = None) -> Key:
        """Returns the key that :meth:`execution` and :meth:`begin_many` derive from `key`.

        Args:
            key: text, an integer, a UUID, or a list or tuple of these.
            fingerprint: a value that must be equal whenever `key` is equal, such as a request body.

        Raises:
            KeyRuleError: if `key` cannot be used as a key, or `fingerprint` has no canonical form.
        """
        if isinstance(key, Key):
            # Hashed again, it would be another key, without the record of this one.
            raise KeyRuleError(
                f"{self.name}: the key is a Key, and would be hashed to another key; pass what it "
                "was derived from, or its str()"
            )
        try:
            derived = self._rule.of_text(key)
        except KeyRuleError:
            raise
        except Exception as error:
            # A type of the application raised it; the message may quote the key.
            raise KeyRuleError(
                f"{self.name}: a key of type {type(key).__qualname__} raised "
                f"{type(error).__name__}; it must be {KINDS}"
            ) from None
        if fingerprint is None:
            return derived
        try:
            return derived.with_fingerprint(fingerprint_of(canonical(fingerprint)))
        except NotCanonicalError as error:
            raise KeyRuleError(f"{self.name}: the fingerprint {error}") from None

    @cached_property
    def executor(self) -> Executor:
        """The executor of blocking code."""
        if self.app is not None:
            return configuration.executor_of(self.app, self.settings)
        codec = self._codec
        return Executor(RecordStore(self._store_config, codec.decode, codec.view), codec)

    @cached_property
    def async_executor(self) -> AsyncExecutor:
        """The executor of coroutines."""
        codec = self._codec
        return AsyncExecutor(RecordStore(self._store_config, codec.decode, is_async=True), codec)

    @cached_property
    def _codec(self) -> PayloadCodec:
        if self.app is not None:
            return self.executor.codec
        return configuration.codec_of(None, self.settings, ResultCodec(), self._accept)

    def records(
        self,
        *,
        state: State | str | None = None,
        task: str | None = None,
        older_than: timedelta | float | None = None,
        label: str | None = None,
    ) -> Iterator[Record]:
        """Iterates over all records with SCAN, on every node of a Cluster. For blocking code.

        With an app, this includes the records of its tasks in all their stores. Accessing
        `Record.result` decodes a result, and first fetches a large one.

        Args:
            state: only records in this state.
            task: only records of the task or function with this name.
            older_than: only records that entered their state longer ago (seconds or timedelta).
            label: only records whose label contains this text, in any case.

        Raises:
            StoreUnavailableError: if Redis is unavailable.
            ValueError: if `state` is not a state.
        """
        tasks = app_tasks.enabled(self.app) if self.app is not None else []
        stores = distinct([self.executor.store, *app_tasks.stores(tasks)])
        return records(stores, state=state, task=task, older_than=older_than, label=label)

    def settings_for(self, options: Mapping[str, Any], where: str) -> Settings:
        """Returns the engine's settings, overridden by `options`.

        Raises:
            SettingsError: for the first invalid option, in one line that begins with `where`.
        """
        if not options:
            return self.settings
        for option in options:
            if option in _STORE_OPTIONS:
                raise SettingsError(
                    f"{where}: {option} can only be set for the whole engine; pass it to "
                    "Idempotency()"
                )
        return self._build(options, where)

    def _overridden(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the engine's options, replaced by `options`."""
        overridden = {*options, *(PREFIX + option for option in options)}
        others = {name: value for name, value in self._values.items() if name not in overridden}
        return {**others, **options}

    def _build(self, options: Mapping[str, Any], where: str) -> Settings:
        """Returns the settings that these and the engine's options give, after checks."""
        for option, value in options.items():
            if option in _TASK_OPTIONS:
                raise SettingsError(f"{where}: {option} is for tasks only; remove it")
            if option not in _OPTIONS:
                raise unknown_option(option, where, ("key", "label", *_OPTIONS))
            choices = _ALLOWED_POLICIES.get(option)
            if choices and value not in choices:
                raise SettingsError(
                    f"{where}: {option} must be {' or '.join(map(repr, choices))} outside tasks, "
                    "because the other values need a message"
                )
        built = settings.build(self._overridden(options), where)
        default = self.app.conf.result_serializer if self.app else "json"
        return configuration.resolve(built, where, self.app, default, self._accept)

    def close(self) -> None:
        """Closes the connections that blocking code opened; the next call reconnects."""
        run_sync(self.executor.store.aclose())

    async def aclose(self) -> None:
        """Closes the connections of the running event loop; the next call reconnects."""
        await self.async_executor.store.aclose()


class Block:
    """The context manager of one block, for ``with`` and ``async with``.

    A block that ends without ``complete()`` releases its key, or stores one of ``replay_errors``.
    """

    def __init__(self, engine: Idempotency, key: Key, settings: Settings, label: str = "") -> None:
        self._engine = engine
        self._data = direct_call(engine, key, settings, label)
        self._host = DirectHost(self._data, app=engine.app)
        self._execution: Any = None

    def __enter__(self) -> BlockExecution:
        executor = self._engine.executor
        self._execution = BlockExecution(self._data, self._host, executor.runtime, executor.codec)
        return self._execution.__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: object) -> None:
        self._execution.__exit__(*error)

    async def __aenter__(self) -> AsyncBlockExecution:
        if blocking := _blocking_option(self._data.settings):
            raise SettingsError(
                f"{self._engine.name}: {blocking} needs `with`, not `async with`, since its "
                "connection blocks"
            )
        executor = self._engine.async_executor
        self._execution = AsyncBlockExecution(
            self._data, self._host, AsyncioRuntime(executor.store), executor.codec
        )
        return await self._execution.__aenter__()  # type: ignore[no-any-return]

    async def __aexit__(self, *error: object) -> None:
        await self._execution.__aexit__(*error)


def _blocking_option(settings: Settings) -> str:
    """Returns the name of an option that is set and needs blocking code; empty if there is none."""
    return next((PREFIX + each.blocks for each in settings.extensions if each.blocks), "")


def _configured_options(app: Celery) -> dict[str, Any]:
    """Returns the app's settings by name, without the policies and those for tasks only.

    ``transaction`` is excluded too, since coroutines cannot use it.
    """
    excluded = {*_TASK_OPTIONS, *_ALLOWED_POLICIES, "transaction"}
    names = [PREFIX + field.name for field in fields(Settings) if field.name not in excluded]
    return {name: value for name in names if (value := app.conf.get(name)) is not None}
