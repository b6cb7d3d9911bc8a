"""The gate for callers that are not tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar, overload

from celery import Celery
from kombu.serialization import registry

from celery_idempotent import settings
from celery_idempotent.configuration import app_tasks, configuration
from celery_idempotent.configuration.store_config import store_config_of
from celery_idempotent.errors import SettingsError
from celery_idempotent.executor.async_executor import AsyncExecutor
from celery_idempotent.executor.execution import BaseExecution, unprotected
from celery_idempotent.executor.executor import Executor
from celery_idempotent.functions import batch
from celery_idempotent.functions.batch import AsyncBatch, Batch
from celery_idempotent.functions.call import DirectCall, current_execution
from celery_idempotent.functions.context import ExecutionContext
from celery_idempotent.functions.decorator import IdempotentFunction
from celery_idempotent.key.canonical import canonical
from celery_idempotent.key.key import Key, fingerprint_of
from celery_idempotent.key.rule import KeyRule
from celery_idempotent.payload import encryption_keys
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.payload.plain_result_codec import PlainResultCodec
from celery_idempotent.record.record import Record, State
from celery_idempotent.settings import PREFIX, Settings
from celery_idempotent.store.async_record_store import AsyncRecordStore
from celery_idempotent.store.record_query import records
from celery_idempotent.store.record_store import RecordStore

F = TypeVar("F", bound=Callable[..., Any])

#: Of these a task's other values speak of its message: there is none that could come back.
_POLICIES = {"on_conflict": ("wait", "raise"), "on_store_error": ("raise", "run")}
#: Options of tasks alone.
_OF_TASKS = ("key", "dedupe_publish", "on_store_unavailable_at_start")
#: Options of the engine alone: where the records are.
_OF_PLACE = frozenset(
    {"redis_url", "redis_client", "redis_options", "redis_timeout", "redis_connect_timeout"}
    | {"key_prefix", "offload_backend", "encryption_keys", "breaker_threshold", "breaker_max_delay"}
    | {"wait_replicas", "wait_replicas_timeout", "wait_aof"}
)


class Idempotency:
    """The engine under :class:`IdempotentTask`, for functions, blocks, batches and consumers.

    Args:
        place: where the records are: a Celery app (its settings are the defaults), the URL of a
            Redis, or a client: a redis-py one for code that blocks, a redis.asyncio one for code
            that awaits.
        name: what stands in keys and records where a task's name does, for whatever is no function.
        options: those of a task, without ``idempotency_``; durations in seconds, sizes in bytes.

    Raises:
        SettingsError: for the first option that is wrong, in one line.
    """

    def __init__(self, place: Any, /, *, name: str = "calls", **options: Any) -> None:
        self._app = place if isinstance(place, Celery) else None
        self.name = name
        self._values: dict[str, Any] = {"on_conflict": "wait", "on_store_error": "raise"}
        if self._app is not None:
            configuration.check_names_in(self._app)
            self._values |= _of_app(self._app)
        elif isinstance(place, str):
            self._values["redis_url"] = place
        else:
            self._values["redis_client"] = place
        #: Content types that reading trusts: without an app, what the engine itself writes.
        self._accept = (
            configuration.accepted(self._app)
            if self._app is not None
            else frozenset({registry.name_to_type.get(options.get("serializer") or "json", "")})
        )
        self.settings = self._build(options, f"Idempotency {name!r}")
        self._values |= options
        encryption_keys.check(self.settings)
        self._place = store_config_of(self._app, self.settings)
        if self.settings.offload_backend and self._app is None:
            raise SettingsError(
                "idempotency_offload_backend is one of Celery's: make Idempotency from an app"
            )
        self._rule = KeyRule(name, None, inspect.Signature(), lambda args, kwargs: (args, kwargs))

    @overload
    def idempotent(self, func: F, /) -> F: ...

    @overload
    def idempotent(
        self, /, *, key: Any = None, name: str | None = None, **options: Any
    ) -> Callable[[F], F]: ...

    def idempotent(
        self, func: F | None = None, /, *, key: Any = None, name: str | None = None, **options: Any
    ) -> Any:
        """A decorator: duplicates of a call get its outcome instead of an execution.

        A call whose key is held waits up to ``wait_timeout`` for the outcome, then raises
        ConflictError; under ``on_conflict="raise"`` at once. Works on functions and on async ones,
        which block no thread.

        Args:
            key: as ``idempotency_key`` of a task: None for all arguments, a template, names, or a
                callable.
            name: what stands in keys and records where a task's name does; by default the
                function's module and qualified name, so that moving it makes other keys.
            options: as of the engine, for this function.

        Raises:
            SettingsError: for the first option that is wrong, in one line.
        """
        if func is not None:
            return IdempotentFunction(self, func, name, key, options).wrapped()
        return lambda func: IdempotentFunction(self, func, name, key, options).wrapped()

    def execution(self, key: Any, *, fingerprint: Any = None, **options: Any) -> ExecutionContext:
        """A block of code behind the gate: ``with``, or ``async with``, gives its execution.

        Args:
            key: as of :meth:`key_of`.
            fingerprint: as of :meth:`key_of`.
            options: as of the engine, for this block.

        Raises:
            SettingsError: for the first option that is wrong, in one line.
            KeyRuleError: if `key` cannot be one.
        """
        options_here = self.settings_for(options, self.name)
        executors = (lambda: self.executor, lambda: self.async_executor)
        return ExecutionContext(self, executors, self.key_of(key, fingerprint), options_here)

    def begin_many(
        self, keys: Sequence[Hashable], fingerprints: Sequence[Any] | None = None
    ) -> Batch:
        """Begin all `keys` in one round trip, and keep one lease for those that are to be run.

        Args:
            keys: each as of :meth:`key_of`.
            fingerprints: one for each.

        Raises:
            StoreUnavailableError: if Redis cannot be asked, and the policy is ``raise``.
        """
        return batch.begun(self.executor, keys, self._calls(keys, fingerprints))

    async def abegin_many(
        self, keys: Sequence[Hashable], fingerprints: Sequence[Any] | None = None
    ) -> AsyncBatch:
        """As :meth:`begin_many`, and awaited."""
        return await batch.async_begun(self.async_executor, keys, self._calls(keys, fingerprints))

    def _calls(
        self, keys: Sequence[Hashable], fingerprints: Sequence[Any] | None
    ) -> list[DirectCall]:
        if self.settings.wait_replicas or self.settings.wait_aof:
            raise SettingsError(
                f"Idempotency {self.name!r}: a batch does not wait for replicas: leave out "
                "idempotency_wait_replicas and idempotency_wait_aof, or begin key by key"
            )
        here = replace(self.settings, on_lease_lost="finish")
        prints = [None] * len(keys) if fingerprints is None else fingerprints
        return [
            DirectCall(self, self.key_of(key, fingerprint), here)
            for key, fingerprint in zip(keys, prints, strict=True)
        ]

    @property
    def current(self) -> BaseExecution:
        """The execution under way: its key, token and steps, for the function that it runs."""
        return current_execution.get() or unprotected()

    def key_of(self, key: Any, fingerprint: Any = None) -> Key:
        """The key that :meth:`execution` and :meth:`begin_many` make of `key`.

        Args:
            key: text, a number, a UUID, or a list or tuple of such.
            fingerprint: what must be the same whenever `key` is: a body, arguments, anything that
                has a canonical form.

        Raises:
            KeyRuleError: if `key` cannot be one.
            NotCanonicalError: if `fingerprint` has no canonical form.
        """
        plain = self._rule.of_text(key)
        if fingerprint is None:
            return plain
        return Key(plain.task, plain.digest, fingerprint_of(canonical(fingerprint)))

    @cached_property
    def executor(self) -> Executor:
        """For code that blocks."""
        if self._app is not None:
            return configuration.executor_of(self._app, self.settings)
        return Executor(RecordStore(self._place, self._payloads.decode), self._payloads)

    @cached_property
    def async_executor(self) -> AsyncExecutor:
        """For code on event loops."""
        codec = self._payloads
        return AsyncExecutor(AsyncRecordStore(self._place, codec.decode), codec)

    @cached_property
    def _payloads(self) -> PayloadCodec:
        if self._app is not None:
            return self.executor.codec
        return PayloadCodec(
            PlainResultCodec(), self._accept, cipher=encryption_keys.cipher(self.settings)
        )

    def records(
        self,
        *,
        state: State | str | None = None,
        task: str | None = None,
        older_than: timedelta | float | None = None,
    ) -> Iterator[Record]:
        """All records here: by SCAN, on every node of a Cluster, never KEYS. For code that blocks.

        From an app these are those of its tasks, too, wherever they keep them. A result is decoded,
        and a large one fetched, when `Record.result` is asked for it.

        Args:
            state: only records in this state.
            task: only records of this task, or of what else stands in its place, by name.
            older_than: only records that came into their state longer ago (seconds, or timedelta).

        Raises:
            StoreUnavailableError: if Redis cannot be asked.
            ValueError: if there is no such state.
        """
        tasks = app_tasks.enabled(self._app) if self._app is not None else []
        stores = dict.fromkeys([self.executor.store, *app_tasks.stores(tasks)])
        return records(stores, state=state, task=task, older_than=older_than)

    def settings_for(self, options: Mapping[str, Any], where: str) -> Settings:
        """The engine's settings with these `options`.

        Raises:
            SettingsError: for the first one that is wrong, in one line that begins with `where`.
        """
        if not options:
            return self.settings
        for option in options:
            if option in _OF_PLACE:
                raise SettingsError(f"{where}: {PREFIX}{option} is an option of Idempotency itself")
        return self._build(options, where)

    def _build(self, options: Mapping[str, Any], where: str) -> Settings:
        settings.check_names((PREFIX + option for option in options), where)
        for option, value in options.items():
            if option in _OF_TASKS:
                raise SettingsError(f"{where}: {PREFIX}{option} is an option of tasks")
            choices = _POLICIES.get(option)
            if choices and value not in choices:
                raise SettingsError(
                    f"{where}: {PREFIX}{option} must be {' or '.join(map(repr, choices))} here: "
                    "there is no message that could do otherwise"
                )
        values = {PREFIX + option: value for option, value in {**self._values, **options}.items()}
        built = settings.build(values, where)
        default = self._app.conf.result_serializer if self._app else "json"
        return configuration.with_serializer(built, where, default, self._accept)

    def close(self) -> None:
        """Hang up what code that blocks has opened; the next call connects again."""
        self.executor.store.close()

    async def aclose(self) -> None:
        """Hang up what the running event loop has opened; the next call connects again."""
        await self.async_executor.store.aclose()


def _of_app(app: Celery) -> dict[str, Any]:
    """What the app's configuration says for all its tasks, and is not of tasks alone."""
    names = [field.name for field in fields(Settings)]
    values = {name: app.conf.get(PREFIX + name) for name in names}
    return {
        name: value
        for name, value in values.items()
        if value is not None and name not in _OF_TASKS and name not in _POLICIES
    }
