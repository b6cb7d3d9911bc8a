"""From Celery's configuration and a task's attributes to settings, a key rule and a gate."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from types import CodeType
from typing import Any

import click
from celery import Celery, Task
from celery.exceptions import ImproperlyConfigured
from kombu.compression import get_encoder
from kombu.serialization import dumps, prepare_accept_content, registry

from celery_idempotent import settings
from celery_idempotent.configuration.arguments import normaliser
from celery_idempotent.configuration.store_config import store_config_of
from celery_idempotent.errors import SettingsError
from celery_idempotent.executor.executor import Executor
from celery_idempotent.key.rule import KeyRule
from celery_idempotent.payload import encryption_keys, offload_storage
from celery_idempotent.payload.backend_result_codec import BackendResultCodec
from celery_idempotent.payload.codec import PayloadCodec
from celery_idempotent.payload.offload_storage import BackendOffloadStorage
from celery_idempotent.settings import OPTIONS, PREFIX, Settings
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.record_store import RecordStore


class ConfigurationError(SettingsError, ImproperlyConfigured, click.ClickException):
    """A fault in the settings, as Celery raises it; its command line shows the sentence alone."""

    def __init__(self, message: str) -> None:
        click.ClickException.__init__(self, message)


class TaskConfiguration:
    """All that the gate needs to know of one task.

    Raises:
        ConfigurationError: for the first fault found, in one line that names the option.
    """

    def __init__(self, task: type[Task], app: Celery) -> None:
        self.settings, self.rule = check(task, app)
        self._app = app

    @cached_property
    def executor(self) -> Executor:
        """The gate to the task's Redis, which is not contacted yet.

        Raises:
            ConfigurationError: if no setting names a Redis.
        """
        return executor_of(self._app, self.settings)


def check(task: type[Task], app: Celery) -> tuple[Settings, KeyRule]:
    """The settings and the key rule of `task`, each found right.

    Raises:
        ConfigurationError: for the first fault found, in one line that names the option.
    """
    try:
        check_names_in(app)
        settings.check_names(_attributes_of(task), task.name)
        options = settings.build(dict(_values(task, app)), task.name)
        options = with_serializer(options, task.name, app.conf.result_serializer, accepted(app))
        if options.offload_backend:
            offload_storage.check(app, options.offload_backend)
        encryption_keys.check(options)
        if options.enabled:
            _check_call(task)
            _check_body(task)
        rule = KeyRule(task.name, options.key, _signature_of(task), normaliser(task.serializer))
    except SettingsError as error:
        raise ConfigurationError(str(error)) from None
    return options, rule


def _values(task: type[Task], app: Celery) -> Iterator[tuple[str, Any]]:
    for option in OPTIONS:
        value = getattr(task, option, None)
        if value is None:
            value = app.conf.get(option)
        if value is not None:
            yield option, value


def check_names_in(app: Celery) -> None:
    """Refuse what looks like an option in the app's configuration and is none.

    Raises:
        SettingsError: naming it, and the option that was probably meant.
    """
    known = (*OPTIONS, *settings.APP_OPTIONS)
    settings.check_names(options_in(app), "the Celery configuration", known)


def options_in(app: Celery) -> Iterator[str]:
    """Everything in the configuration that is named like an option of ours, without namespace.

    In Django's settings an upper-case name without the namespace is some other library's.
    """
    namespace = (app.namespace or "").rstrip("_").lower() + "_"
    for name in map(str, app.conf.keys()):
        if name.startswith(PREFIX):
            yield name
        elif name.lower().startswith(namespace + PREFIX):
            yield name.lower().removeprefix(namespace)


def _attributes_of(task: type[Task]) -> Iterator[str]:
    """Attributes that look like options, but for the class's methods and properties."""
    for name in dir(task):
        value = inspect.getattr_static(task, name) if name.startswith(PREFIX) else property()
        if not (inspect.isroutine(value) or isinstance(value, property)):
            yield name


def with_serializer(
    options: Settings, where: str, default: str, accept: frozenset[str]
) -> Settings:
    """`options` with a serializer and a compression that are found right.

    Args:
        where: the task, for the error's sentence.
        accept: content types that will be read.

    Raises:
        SettingsError: if one cannot be used, or what it writes is not accepted.
    """
    serializer = options.serializer or default
    if serializer not in registry.name_to_type:
        raise SettingsError(f"{where}: idempotency_serializer: kombu knows no {serializer!r}")
    try:
        dumps(None, serializer)
    except Exception as error:
        raise SettingsError(
            f"{where}: idempotency_serializer {serializer!r} cannot be used here: {error}"
        ) from None
    if registry.name_to_type[serializer] not in accept:
        raise SettingsError(
            f"{where}: idempotency_serializer {serializer!r} writes what "
            "result_accept_content (or accept_content) does not let anyone read"
        )
    if options.compression:
        try:
            get_encoder(options.compression)
        except KeyError:
            raise SettingsError(
                f"{where}: idempotency_compression: kombu knows no {options.compression!r}"
            ) from None
    return replace(options, serializer=serializer)


def accepted(app: Celery) -> frozenset[str]:
    """Content types that the app reads results of."""
    accept = app.conf.result_accept_content
    if accept is None:
        accept = app.conf.accept_content
    return frozenset(prepare_accept_content(accept))


def _check_call(task: type[Task]) -> None:
    """Refuse a ``__call__`` that runs the body itself: the gate stands in the one above it."""
    for cls in task.__mro__:
        if "idempotency_configuration" in vars(cls):
            return
        call = vars(cls).get("__call__")
        names = set(_names_in(getattr(inspect.unwrap(call), "__code__", None))) if call else set()
        if "run" in names and "__call__" not in names:
            raise SettingsError(
                f"{task.name}: {cls.__name__}.__call__ goes round the gate by self.run; let it "
                "call super().__call__ instead"
            )


def _names_in(code: Any) -> Iterator[str]:
    """Every name that `code` speaks of, functions inside it included; none if it is no code."""
    if isinstance(code, CodeType):
        yield from code.co_names
        for constant in code.co_consts:
            yield from _names_in(constant)


def _check_body(task: type[Task]) -> None:
    """Refuse a body that has not run when it returns: its key would be completed without it."""
    body = task.run
    if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
        raise SettingsError(
            f"{task.name} is async def, which no worker awaits: it would be done before it runs; "
            "let a plain function call asyncio.run"
        )
    if inspect.isgeneratorfunction(body):
        raise SettingsError(
            f"{task.name} is a generator, which no worker runs: it would be done before it starts; "
            "return a list"
        )


def _signature_of(task: type[Task]) -> inspect.Signature:
    """What the task takes, without ``self``."""
    signature = inspect.signature(task.run)
    if isinstance(inspect.getattr_static(task, "run"), staticmethod):
        return signature
    parameters = list(signature.parameters.values())
    return signature.replace(parameters=parameters[1:])


_making = threading.Lock()


def executor_of(app: Celery, options: Settings) -> Executor:
    """The app's gate to these places: tasks that share them share its connections."""
    try:
        config = store_config_of(app, options)
        wanted = config, options.offload_backend, options.encryption_keys
        with _making:
            executors: list[tuple[tuple[StoreConfig, Any, Any], Executor]]
            executors = vars(app).setdefault("_idempotency_gates", [])
            for known, executor in executors:
                if known == wanted:
                    return executor
            executor = _new_executor(app, config, options)
            executors.append((wanted, executor))
            return executor
    except SettingsError as error:
        raise ConfigurationError(str(error)) from None


def _new_executor(app: Celery, config: StoreConfig, options: Settings) -> Executor:
    offload = options.offload_backend
    elsewhere = BackendOffloadStorage(app, offload) if offload else None
    cipher = encryption_keys.cipher(options)
    codec = PayloadCodec(BackendResultCodec(app), accepted(app), elsewhere, cipher)
    return Executor(RecordStore(config, codec.decode), codec)
