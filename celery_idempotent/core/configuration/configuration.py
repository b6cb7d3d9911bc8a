"""The configuration of a task: settings, key rule and executor.

It is made of the attributes of the task and the settings of the app. Functions use the parts that
need no task: `resolve`, `codec_of`, `executor_of`.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import click
from celery import Celery, Task
from celery.exceptions import ImproperlyConfigured, TaskPredicate
from kombu.serialization import dumps, prepare_accept_content, registry

from celery_idempotent import settings as definitions
from celery_idempotent.core.configuration.store_config import check_location, store_config_of
from celery_idempotent.core.flow.thread import Executor
from celery_idempotent.core.key import Key
from celery_idempotent.core.key.parameters import normalised
from celery_idempotent.core.key.rule import KeyRule
from celery_idempotent.core.payload.codec import PayloadCodec
from celery_idempotent.core.payload.result_codec import ResultCodec
from celery_idempotent.core.record import Record, Tail
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.core.store.url import names_one_server
from celery_idempotent.errors import SettingsError
from celery_idempotent.settings import OPTIONS, PREFIX, SIMILAR_PREFIX, Settings, TaskOptions

#: The only result backend with fused completion: the script writes as this class does, and a
#: subclass may write something else.
_BACKEND = "celery.backends.redis.RedisBackend"
#: The connection parameters that identify a server, a database and a user, with defaults.
_IDENTITY = {
    "host": "localhost",
    "port": 6379,
    "path": None,
    "db": 0,
    "username": None,
    "password": None,
    "credential_provider": None,
}
#: The names of options without prefix, except for those that are options of Celery's tasks.
_UNPREFIXED = {option.removeprefix(PREFIX) for option in OPTIONS} - {"serializer", "compression"}
#: Names of options without prefix that may be attributes of a user's class by coincidence.
_COMMON_WORDS = frozenset(
    {"enabled", "shadow", "label", "max_attempts", "key_prefix"}
    | {"redis_url", "redis_client", "redis_options", "redis_timeout"}
)
#: The options whose names, in upper case, no other library can mean in Django's settings.
_UNMISTAKABLE = {PREFIX + name for name in _UNPREFIXED - _COMMON_WORDS - {"key"}}


class ConfigurationError(SettingsError, ImproperlyConfigured, click.ClickException):
    """An invalid setting, as Celery raises it; its command line shows the message alone."""

    def __init__(self, message: str) -> None:
        click.ClickException.__init__(self, message)


class TaskConfiguration:
    """The validated settings, the key rule and the executor of one task.

    Args:
        task: the task, or its class if there is no instance yet.

    Raises:
        ConfigurationError: for the first invalid option, in one line that names it.
    """

    def __init__(self, task: Task | type[Task], app: Celery) -> None:
        self._app, self._task = app, task
        task_class: Any = task if isinstance(task, type) else type(task)
        try:
            check_option_names(app)
            definitions.check_names(attributes_of(task), task.name, TaskOptions.__annotations__)
            _check_prefixes(task_class, task.name)
            settings = definitions.build(dict(_values_of(task, app)), task.name)
            accept = accepted_content_types(app)
            settings = resolve(settings, task.name, app, app.conf.result_serializer, accept)
            if settings.enabled:
                _check_body(task_class.run, task.name)
                _check_strategy(task_class, task.name)
            #: Whether calls go through the flow; otherwise they run as those of a plain task.
            self.is_protected = settings.enabled
            #: Whether every call runs as a plain task and is only counted.
            self.in_shadow = settings.shadow and settings.enabled
            self.settings = settings
            # A task with ``pydantic=True`` in Celery 5.7 and later.
            dump = getattr(task_class.run, "dump_arguments", None)
            if dump is not None:
                dump = partial(dump, bound=not _is_static(task_class))
            normalise = partial(normalised, task.serializer, dump=dump)
            self.rule = KeyRule(task.name, settings.key, _signature_of(task_class), normalise)
            #: Whether it was logged that calls of the task in a map run without protection.
            self.used_in_map = False
            #: The task's `extensions.label.Label`, which that option sets; None without a template.
            self.label: Any = None
            for option in settings.option_classes:
                option.configure(self)
        except SettingsError as error:
            raise ConfigurationError(str(error)) from None

    @cached_property
    def executor(self) -> Executor:
        """The executor for the task's store, which is not connected yet.

        Raises:
            ConfigurationError: if no setting names a Redis server.
        """
        return executor_of(self._app, self.settings)

    @cached_property
    def fusion_obstacle(self) -> str:
        """The reason why Celery writes the task's results; empty if the record's script does.

        Never raises: it is first read after a body has ended, when its outcome must be stored.
        """
        if self.in_shadow:
            return "idempotency_shadow is on"
        try:
            return _fusion_obstacle(self._task, self._app, self.settings, self.executor.store)
        except Exception as error:
            return f"the result backend cannot be examined ({type(error).__name__})"

    def record_key(self, key: Key, task_id: str) -> Key:
        """Returns the key of the record that holds the outcome of `task_id` under `key`."""
        return key.of_message(task_id) if self.settings.runs_again else key

    def tail_of(self, args: Any, kwargs: Any) -> Tail:
        """Returns the tail of the record of a call, or of its reservation."""
        return Tail(label=self.label.of(args, kwargs) if self.label else "")

    def execute(self, command: commands.Command) -> Reply:
        """Executes a command in the task's store, and returns the reply.

        Raises:
            StoreUnavailableError: if Redis does not reply.
        """
        return run_sync(self.executor.store.execute(command))


def is_built_in(task: Task | type[Task]) -> bool:
    """Returns whether `task` is one of Celery's own, such as ``celery.chord_unlock``.

    They have an idempotent class if the app's ``task_cls`` is one.
    """
    return str(task.__module__).startswith("celery.")  # None in code that is run by exec()


def _values_of(task: Task | type[Task], app: Celery) -> Iterator[tuple[str, Any]]:
    """Yields the options that the task or, for each that it lacks, the app has set."""
    if is_built_in(task):
        yield "idempotency_enabled", False
        return
    # Read from the class, not from the instance: there, a key function would be a bound method.
    owner, own = (task, {}) if isinstance(task, type) else (type(task), vars(task))
    for option in OPTIONS:
        value = own.get(option, getattr(owner, option, None))
        if value is None:
            value = app.conf.get(option)
        if value is not None:
            yield option, value


def check_option_names(app: Celery) -> None:
    """Rejects settings that are named like an option but do not exist.

    Raises:
        SettingsError: naming the setting and the most similar option.
    """
    known = (*OPTIONS, *definitions.APP_OPTIONS)
    definitions.check_names(_options_in(app), "the Celery configuration", known)


def _options_in(app: Celery) -> Iterator[str]:
    """Yields the settings that are named like options of this package, without namespace.

    In Django's settings, another upper-case name without the namespace belongs to another library.
    """
    namespace = (app.namespace or "").rstrip("_").lower() + "_"
    for name in map(str, app.conf.keys()):
        if name.startswith(SIMILAR_PREFIX):
            yield name
        elif name.lower().startswith(namespace + SIMILAR_PREFIX):
            yield name.lower().removeprefix(namespace)
        elif not app.namespace and name.startswith("CELERY_IDEMPOTENCY_"):
            raise SettingsError(
                f"the Celery configuration: {name} has no effect without namespace='CELERY'; "
                f"its name here is {name.removeprefix('CELERY_').lower()}"
            )
        elif name.isupper() and name.lower() in _UNMISTAKABLE:
            raise SettingsError(
                f"the Celery configuration: {name} has no effect; "
                f"its name here is {namespace.upper() + name if app.namespace else name.lower()}"
            )


def attributes_of(task: Task | type[Task]) -> Iterator[str]:
    """Yields the attributes that are named like options, without methods and properties."""
    for name in dir(task):
        if name.startswith(SIMILAR_PREFIX) and not _is_code(inspect.getattr_static(task, name)):
            yield name


def _is_code(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, property)


def _check_prefixes(task: Any, where: str) -> None:
    """Rejects an option without its prefix, as functions spell it: a task would ignore it.

    Not every attribute of such a name is meant as an option: not if a base class has it too, nor,
    in the body of a class, if it is a common word.

    Raises:
        SettingsError: naming the option.
    """
    inherited: set[str] = set()
    for cls in reversed(task.__mro__):
        attributes = vars(cls)
        if hasattr(cls, "idempotency_configuration"):
            is_decorated = "__wrapped__" in attributes
            for name in _UNPREFIXED.intersection(attributes) - inherited:
                if is_decorated or not (name in _COMMON_WORDS or _is_code(attributes[name])):
                    raise SettingsError(
                        f"{where}: {name} has no effect on a task, whose option is {PREFIX}{name}; "
                        "an attribute of your own needs another name"
                    )
        inherited.update(attributes)


def resolve(
    settings: Settings, where: str, app: Celery | None, default: str, accept: frozenset[str]
) -> Settings:
    """Checks `settings`; returns them with a serializer, and as their extensions change them.

    Args:
        where: the task, for the error message.
        default: the serializer if `settings` have none.
        accept: content types that are accepted when results are read.

    Raises:
        SettingsError: if one of them is unavailable or has no effect, or the serializer's content
            type is not accepted.
    """
    check_location(settings)
    if idle := [e.__name__ for e in settings.replay_errors if issubclass(e, TaskPredicate)]:
        raise SettingsError(f"{where}: {PREFIX}replay_errors has no effect on {idle[0]}; remove it")
    serializer = settings.serializer or default
    if serializer not in registry.name_to_type:
        raise SettingsError(
            f"{where}: idempotency_serializer: kombu has no serializer {serializer!r}"
        )
    try:
        dumps(None, serializer)
    except Exception as error:
        raise SettingsError(
            f"{where}: idempotency_serializer {serializer!r} cannot be used here: {error}"
        ) from None
    if registry.name_to_type[serializer] not in accept:
        raise SettingsError(
            f"{where}: idempotency_serializer {serializer!r} writes a content type that is not in "
            "result_accept_content (or accept_content): add it there, or set another serializer"
        )
    if settings.compression:
        from celery_idempotent.core.payload.compression import decompressor

        try:
            decompressor(settings.compression)
        except KeyError:
            raise SettingsError(
                f"{where}: idempotency_compression must be gzip, bzip2, lzma or zstd, and installed"
                f", not {settings.compression!r}"
            ) from None
    settings = replace(settings, serializer=serializer)
    # Shadow, the first option, comes last, because it switches others off.
    for option in reversed(settings.option_classes):
        settings = option.resolve(settings, where, app)
    return settings


def codec_of(
    app: Celery | None, settings: Settings, results: ResultCodec, accept: frozenset[str]
) -> PayloadCodec:
    """Returns the codec for these `settings`.

    Args:
        results: the codec of results and errors, of this app.
        accept: content types that may be decoded.

    Raises:
        SettingsError: if what an option needs for it cannot be read.
    """
    codec = PayloadCodec(results, accept)
    for option in settings.option_classes:
        option.extend_codec(codec, settings, app)
    return codec


def accepted_content_types(app: Celery) -> frozenset[str]:
    """Returns the content types that the app accepts in results."""
    accept = app.conf.result_accept_content
    if accept is None:
        accept = app.conf.accept_content
    return frozenset(prepare_accept_content(accept))


def _check_body(body: Any, name: str) -> None:
    """Rejects a body that returns before it has run: its key would be completed too early."""
    if inspect.iscoroutinefunction(body):
        raise SettingsError(
            f"{name} is a coroutine function, which Celery does not await: wrap its body in "
            "asyncio.run() in a plain function, or set idempotency_enabled = False on the task"
        )
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise SettingsError(
            f"{name} is a generator function, which Celery does not iterate: return a list instead"
        )


def _check_strategy(task: Any, name: str) -> None:
    """Rejects a class whose messages may not reach the task, such as that of celery-batches."""
    if task.Strategy != Task.Strategy:
        owner = next(cls.__name__ for cls in task.__mro__ if "Strategy" in vars(cls))
        raise SettingsError(
            f"{name}: {owner} has a Strategy of its own, which may run bodies unprotected: remove "
            "IdempotentTask from the bases of the task (Idempotency.begin_many() protects the "
            "entries of a batch), or set idempotency_enabled = False"
        )


def _is_static(task: type[Task]) -> bool:
    """Returns whether the body does not take ``self``."""
    return isinstance(inspect.getattr_static(task, "run"), staticmethod)


_ANY_ARGUMENTS = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def _signature_of(task: type[Task]) -> inspect.Signature:
    """Returns the signature of the task's body without ``self``, or Django's context."""
    body, omits_first = task.run, not _is_static(task)
    accepted = [*inspect.signature(body, follow_wrapped=False).parameters.values()][omits_first:]
    takes_any = {parameter.kind for parameter in accepted} == _ANY_ARGUMENTS
    if takes_any and (django_task := _django_task(body)):
        body, omits_first = django_task.func, django_task.takes_context
    signature = inspect.signature(body)
    parameters = [*signature.parameters.values()]
    return signature.replace(parameters=parameters[omits_first:])


def _django_task(body: Any) -> Any:
    """Returns the task of ``django.tasks`` that `body` runs; None if it runs none.

    A backend of ``django.tasks`` registers such a function with Celery: it takes any arguments, and
    closes over the task.
    """
    modules = map(sys.modules.get, ("django.tasks.base", "django_tasks.base"))
    classes = tuple(module.Task for module in modules if module)
    for cell in (getattr(body, "__closure__", None) or ()) if classes else ():
        with contextlib.suppress(ValueError):  # the cell is empty
            if isinstance(cell.cell_contents, classes):
                return cell.cell_contents
    return None


_executors_lock = threading.Lock()


def executor_of(app: Celery, settings: Settings) -> Executor:
    """Returns the app's executor for these settings; tasks of one store share its connections."""
    try:
        config = store_config_of(app, settings)
        identity = config, [getattr(settings, name) for name in definitions.MARKS]
        with _executors_lock:
            # Not a dictionary, because the values of some options may not be hashable.
            executors: list[tuple[tuple[StoreConfig, Any], Executor]]
            executors = vars(app).setdefault("_idempotency_executors", [])
            for other_identity, executor in executors:
                if other_identity == identity:
                    return executor
            codec = codec_of(app, settings, ResultCodec(app), accepted_content_types(app))
            methods = PayloadCodec.decode, PayloadCodec.view
            decoders = (_decoder(app, codec, method) for method in methods)
            executor = Executor(RecordStore(config, *decoders), codec)
            executors.append((identity, executor))
            return executor
    except SettingsError as error:
        raise ConfigurationError(str(error)) from None


def _decoder(
    app: Celery, codec: PayloadCodec, method: Callable[[PayloadCodec, Record], Any]
) -> Callable[[Record], Any]:
    """Returns a function that decodes a record by `method` of its task's codec, else of `codec`.

    One scan reads the records of several tasks, whose options may change payloads differently.
    """

    def decode(record: Record) -> Any:
        configuration = getattr(app.tasks.get(record.task), "idempotency_configuration", None)
        own_codec = configuration.executor.codec if configuration else codec
        return method(own_codec, record)

    return decode


def _fusion_obstacle(
    task: Task | type[Task], app: Celery, settings: Settings, store: RecordStore
) -> str:
    """Returns the reason why Celery writes the results of `task`; empty if the script can."""
    if not settings.fused_completion:
        return "idempotency_fused_completion is off"
    if task.ignore_result:
        return "its result is not kept (ignore_result)"
    if store.config.wait_replicas:
        return "outcomes wait for replicas"
    if task._replaces_backend:  # noqa: SLF001
        return "its class has a backend of its own"
    backend = app.tasks[task.name].backend
    kind = f"{type(backend).__module__}.{type(backend).__qualname__}"
    if kind != _BACKEND:
        return f"the result backend is not Celery's RedisBackend, but {type(backend).__qualname__}"
    # A user's client, Sentinels and cluster nodes have no address to compare.
    if not names_one_server(store.config.url):
        return "the records are not on a single server with a URL"
    provider = {"credential_provider": store.config.options.get("credential_provider")}
    records = store.client.get_connection_kwargs() | provider
    if _identity(backend.connparams) != _identity(records):
        return "the records and the results use different servers, databases or users"
    return ""


def _identity(parameters: Mapping[str, Any]) -> list[Any]:
    return [parameters.get(name) or default for name, default in _IDENTITY.items()]
