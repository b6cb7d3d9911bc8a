"""The task base class.

It overrides methods of Celery's `Task`, and delegates to the packages `message`, `publish` and
`receive`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from celery import Celery, Task, current_task, signature
from celery.app.task import Context
from celery.canvas import Signature
from celery.exceptions import Ignore, Reject, Retry
from celery.result import AsyncResult, EagerResult
from celery.utils import uuid
from kombu.exceptions import EncodeError

from celery_idempotent.core import worker
from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.configuration.configuration import TaskConfiguration
from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import CallIdentity, report_refused
from celery_idempotent.core.flow.execution import Execution, unprotected
from celery_idempotent.core.key import Key, message_form
from celery_idempotent.core.key.rule import TASK_ID
from celery_idempotent.core.record import Record
from celery_idempotent.core.store import run_sync
from celery_idempotent.core.task.message import call_options, message_headers
from celery_idempotent.core.task.message.key_resolution import resolve_received_key
from celery_idempotent.core.task.message.message_headers import id_text
from celery_idempotent.core.task.receive import celery_log, user_methods
from celery_idempotent.core.task.receive.host import (
    TaskHost,
    host_in_context,
    result_written,
    soft_limit_of,
)
from celery_idempotent.errors import (
    ConflictError,
    IdempotencyError,
    KeyRuleError,
    ResultDiscardedError,
)
from celery_idempotent.settings import OPTIONS, TaskOptions

logger = logging.getLogger(__name__)

#: Attributes of `IdempotentTask` that hide those of a base class after it; its other methods call
#: ``super()``.
_HIDING = {"__call__", "acks_late", "reject_on_worker_lost", "throws", *OPTIONS}

#: Celery's tasks that call another task as a function, once for each item of a list.
_MAPS = {"celery.map", "celery.starmap"}

#: Celery's and kombu's errors for options of a wrong type or value.
_WRONG_OPTION = (AttributeError, LookupError, TypeError, ValueError)

#: The execution of a plain function call whose options give it a context, such as a transaction.
_plain_execution: ContextVar[Execution | None] = ContextVar("idempotent_plain", default=None)


@dataclass(eq=False)
class _WrittenBackend:
    """Stands in for a result backend that has the current task's result, by fused completion.

    Celery's tracer calls ``task.backend.mark_as_done()`` with the value of the body, even if the
    result is stored already. Its built-in ways to skip this write do not work here: ``Ignore``
    suppresses ``task_success``, and a request with ``ignore_result`` looks different to handlers
    and signals. Therefore the task's ``backend``, a public property, returns this stand-in once. If
    other code reads the property first, the tracer gets the real backend, which finds the result
    and does not change it.
    """

    _backend: Any
    #: The task whose result the script has written, so the backend has it already.
    _task_id: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def mark_as_done(self, task_id: Any, *args: Any, **options: Any) -> None:
        """Does nothing, unless a handler has changed the id of the request."""
        if id_text(task_id) != self._task_id:
            self._backend.mark_as_done(task_id, *args, **options)


def _host_of(request: Context) -> TaskHost | None:
    """Returns the host of `request`; None if it is not protected or has not begun."""
    host: TaskHost | None = getattr(request, "idempotency_host", None)
    return host and host.in_flow


def _warn_of_map(task: Task) -> None:
    """Logs a WARNING the first time that a map of Celery calls `task` for an item."""
    if not current_task or current_task.name not in _MAPS:
        return
    configuration = task.idempotency_configuration
    if not configuration.is_protected:
        return
    args, kwargs = current_task.request.args, current_task.request.kwargs
    # The current task is a map. It calls `task` for its items only if that is the task it maps:
    # Celery also calls errbacks as functions.
    mapped = signature(kwargs["task"] if "task" in kwargs else args[0]).task
    if mapped == task.name and not configuration.used_in_map:
        configuration.used_in_map = True
        logger.warning(
            "%s: the items of map, starmap and chunks run without protection; publish a group of "
            "its signatures to protect each call",
            task.name,
        )


class _WhileProtected:
    """An attribute that is True for a protected task, and a Celery setting for any other task."""

    def __init__(self, setting: str) -> None:
        self._setting = setting

    def __get__(self, task: Any, owner: type[Task]) -> Any:
        protected = task is None or task.idempotency_configuration.is_protected
        return protected or task.app.conf[self._setting]


class IdempotentTask(TaskOptions, Task):
    """A task whose duplicates get the outcome of the first execution instead of their own.

    ``@app.task(base=IdempotentTask, idempotency_key="order:{order_id}")``. Every option is an
    attribute of the task. None means its default, the Celery setting of the same name. Durations
    are numbers of seconds or timedeltas, sizes numbers of bytes.
    """

    abstract = True

    # The record makes redelivery safe, and without redelivery a crash would lose the task.
    acks_late: Any = _WhileProtected("task_acks_late")
    reject_on_worker_lost: Any = _WhileProtected("task_reject_on_worker_lost")

    #: Celery logs these errors in one line, without a traceback, and Sentry ignores them.
    throws = (ConflictError, ResultDiscardedError)

    #: The configurations of the tasks of this class, by task: Celery may make several instances of
    #: one class, with other names and options.
    _configurations: ClassVar[dict[Any, TaskConfiguration]] = {}
    #: Whether a subclass replaces `backend`, so that only Celery writes its results.
    _replaces_backend = False
    #: If a subclass has a ``__call__``: the function that finds it, and the method that replaces
    #: it. `user_methods.wrap` sets both.
    _own_call: Any = None
    _wrapped_call: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuses an order of bases in which this class hides ``__call__`` or options of another.

        Raises:
            TypeError: naming them.
        """
        super().__init_subclass__(**options)
        place = cls.__mro__.index(IdempotentTask)
        chosen = {name for base in cls.__mro__[:place] for name in vars(base)}
        for base in cls.__mro__[place + 1 : -1]:
            hidden = sorted(_HIDING.intersection(vars(base)) - chosen)
            if hidden and base.__module__.partition(".")[0] not in ("celery", "celery_idempotent"):
                raise TypeError(
                    f"IdempotentTask hides {', '.join(hidden)} of {base.__name__} in "
                    f"{cls.__name__}: write class {cls.__name__}({base.__name__}, IdempotentTask)"
                )

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Raises an error for invalid options when the task is registered."""
        super().on_bound(app)
        own_backend = inspect.getattr_static(cls, "backend")
        cls._replaces_backend = own_backend is not vars(IdempotentTask)["backend"]
        cls._configurations = {}
        if cls.name is not None:
            # Made to validate the options, and not kept: the app's settings may still change.
            cls._wrap_if_enabled(TaskConfiguration(cls, app))

    @classmethod
    def _wrap_if_enabled(cls, configuration: TaskConfiguration) -> TaskConfiguration:
        if configuration.is_protected:
            user_methods.wrap(cls, IdempotentTask)
        return configuration

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a message of a worker through the flow; any other call is a function call.

        A ``__call__`` of a subclass runs inside the execution, and reaches the body through this
        method.
        """
        if self._own_call and (running := user_methods.current(self)):
            # The user's ``__call__`` has called this as ``super().__call__``: the body follows.
            # With None as the current one, a call of the task in the body is a call of its own.
            return user_methods.run_as(None, running.body, args, kwargs)
        request = self.request_stack.top
        # Celery sets `_protected` when a request reaches its body: from then on, a call of the task
        # is a plain function call.
        if request is None or request.called_directly or request._protected:  # noqa: SLF001
            _warn_of_map(self)
            return self._run_plain(super().__call__, args, kwargs)
        request._protected = 1  # noqa: SLF001
        if worker.counters is not None:
            worker.counters.enter(request.id)
        request.idempotency_without_body = True
        configuration = self._configurations.get(self) or self.idempotency_configuration
        in_shadow, task_id = configuration.in_shadow, id_text(request.id)
        try:
            key, headers = resolve_received_key(configuration, request, task_id, args, kwargs)
        except (IdempotencyError, TypeError) as error:
            event = table.WOULD_REFUSE if in_shadow else table.REFUSED
            report_refused(CallIdentity(self, self.name, task_id), error, event)
            if not in_shadow:
                raise
            key = None
        if key is None:
            request.idempotency_without_body = False
            soft_limit_of(request).begin_body()  # since the flow, which would do it, does not run
            # For a protected task, `user_methods` has skipped the tracer's call of `before_start`.
            if configuration.is_protected:
                self.before_start(request.id, args, kwargs)
            return self._run_plain(self.run, args, kwargs)
        host = TaskHost(self, configuration, request, task_id, args, kwargs, key, headers)
        request.idempotency_host = host
        return host.execute()

    def _run_plain(
        self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs `body` without protection, in the context that its options give it.

        If a body around it has a transaction in that database, `body` runs in the same one.
        """
        configuration = self.idempotency_configuration
        if not configuration.settings.extensions:
            return user_methods.run(self, body, args, kwargs)
        from celery_idempotent.core.flow.extension import run_unprotected

        execution = unprotected()
        reset = _plain_execution.set(execution)
        try:
            work = partial(user_methods.run, self, body, args, kwargs)
            return run_unprotected(configuration.settings, execution, work)
        finally:
            _plain_execution.reset(reset)

    def push_request(self, *args: Any, **options: Any) -> None:
        """Starts the request of a call as a function, as Celery does, with the message's headers.

        Celery copies the message's request, and takes attributes that it does not know for headers.
        """
        headers = self.request.headers
        super().push_request(*args, **options)
        if not (args or "headers" in options):
            self.request.headers = headers

    def start_strategy(self, app: Celery, consumer: Any, **options: Any) -> Any:
        """Returns the function that receives messages of the task in a worker, as Celery does."""
        if not self.idempotency_configuration.is_protected:
            return super().start_strategy(app, consumer, **options)
        # Imported here, since programs that only publish do not need it.
        from celery_idempotent.core.task.receive.request import (
            ending_unreadable,
            request_class,
            scheduling,
        )

        self.Request = request_class(self)
        with scheduling(consumer):
            receive = super().start_strategy(app, consumer, **options)
        return ending_unreadable(self, receive)

    @property
    def backend(self) -> Any:
        """The task's result backend, as in Celery."""
        backend, host = super().backend, result_written.get()
        if host is None:
            return backend
        result_written.set(None)
        request = self.request_stack.top
        is_current = host is getattr(request, "idempotency_host", None)
        return _WrittenBackend(backend, id_text(request.id)) if is_current else backend

    @backend.setter
    def backend(self, backend: Any) -> None:
        Task.backend.fset(self, backend)
        self._configurations.pop(self, None)  # fused completion depends on the backend

    @property
    def idempotency(self) -> Execution:
        """The running execution; in a plain function call, an unprotected one.

        Raises:
            IdempotencyError: in a thread that the body has started without its context. Read
                `self.idempotency` in the body, and pass the execution to the thread.
        """
        request = self.request_stack.top
        host = host_in_context(self) if request is None else _host_of(request)
        return (host and host.execution) or _plain_execution.get() or unprotected()

    @property
    def idempotency_configuration(self) -> TaskConfiguration:
        """The settings, key rule and executor of the task, created on first use.

        Raises:
            ImproperlyConfigured: if an option is invalid.
        """
        configuration = self._configurations.get(self)
        if configuration is None:
            configuration = self._wrap_if_enabled(TaskConfiguration(self, self.app))
            self._configurations[self] = configuration
        return configuration

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> AsyncResult:
        """Publishes a call, as Celery does.

        With ``idempotency_dedupe_publish``, a call whose key is queued, running or finished is not
        published: it returns the result of the first call, or raises ConflictError. A duplicate
        whose caller chooses the `task_id` is still published.

        Args:
            options: Celery's, and two more. ``idempotency_key`` is an explicit key of this call
                (text, an integer, a UUID, or a tuple of these), or False to run it without
                protection. ``idempotency_result_ttl`` is the time for which its result is kept.

        Raises:
            TypeError: if an option begins with ``idempotency`` but does not exist.
            KeyRuleError: if `idempotency_key` is invalid, or a deduplicated publish derives no key.
            SettingsError: if `idempotency_result_ttl` is invalid.
            KeyReusedError: if publishing is deduplicated and the key was used with other arguments.
            ConflictError: with ``idempotency_dedupe_publish="raise"``, if another call has the key.
            CorruptRecordError: if publishing is deduplicated and the record cannot be read.
        """
        deduplicates = self.idempotency_configuration.settings.deduplicates
        is_option = kwargs and call_options.names_any(tuple(kwargs))
        if not (task_id or options or is_option or deduplicates):  # nothing to check or to add
            return super().apply_async(
                args, kwargs, producer=producer, link=link, link_error=link_error, shadow=shadow
            )
        has_own_id, task_id = bool(task_id), task_id or uuid()
        text_id = id_text(task_id)
        again = has_own_id and getattr(self.request_stack.top, "idempotency_headers_again", None)
        if again and text_id == id_text(self.request.id):
            # This publishes the running message again. An `apply_async` of a subclass may have
            # dropped the headers for that, or forwarded those of another message.
            options["headers"] = again | message_headers.without_keys(options.get("headers") or {})
        try:
            options = self._bind_headers("apply_async", text_id, kwargs, options)
        except KeyRuleError as error:
            identity = CallIdentity(self, self.name, text_id)
            report_refused(identity, error, table.PUBLISH_REFUSED, "publish")
            raise
        if has_own_id:
            from celery_idempotent.core.task.message import canvas

            if headers := canvas.with_replaced_keys(text_id, options.get("headers")):
                options["headers"] = headers
        options |= {"link": link, "link_error": link_error}
        # By keyword, because an `apply_async` of another base class may take only two positional
        # arguments.
        send = partial(super().apply_async, task_id=task_id, producer=producer, shadow=shadow)
        if not deduplicates:
            return send(args, kwargs, **options)
        from celery_idempotent.core.task.publish.dedupe import publish

        return publish(self, args, kwargs, text_id, options, send, has_own_id=has_own_id)

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> EagerResult:
        """Runs a call eagerly, as Celery does, with the same protection as in a worker."""
        options["task_id"] = options.get("task_id") or uuid()
        text_id = id_text(options["task_id"])
        return super().apply(args, kwargs, **self._bind_headers("apply", text_id, kwargs, options))

    def _bind_headers(
        self, function: str, task_id: str, kwargs: Any, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Checks the options of a call, and moves those of this package into the headers."""
        configuration = self.idempotency_configuration
        in_shadow = configuration.in_shadow
        call_options.check(function, options)
        headers: Mapping[str, Any] = {}
        try:
            headers = message_headers.as_mapping(options.get("headers"))
        except (TypeError, ValueError):
            if function == "apply_async":
                raise  # Celery refuses them, too; of an eager call it does not read them
        options = {**options, "headers": headers}
        names = (*headers, *(kwargs if isinstance(kwargs, Mapping) else ()))
        if configuration.is_protected and not in_shadow and call_options.names_any(names):
            from celery_idempotent.core.task.message import misplaced

            misplaced.check_arguments(configuration.rule, kwargs)
            misplaced.check_headers(self.name, headers)
        return message_headers.of_options(self.name, task_id, options, in_shadow=in_shadow)

    def retry(self, *args: Any, **options: Any) -> Any:
        """Retries the task, as Celery does, without losing it if the retry cannot be published.

        Celery would drop the message. Here it is requeued and may run earlier than scheduled.

        Raises:
            TypeError: if an option is named like one of this package: a retry keeps its key. If it
                is `task_id`: a retry keeps that, too. If the type of another option is wrong.
        """
        call_options.check("retry", options, known=())
        host = _host_of(self.request)
        in_shadow = self.idempotency_configuration.in_shadow
        if host is not None and not in_shadow and "task_id" in options:
            raise TypeError("retry() takes no task_id: the caller waits for the result of this one")
        from celery_idempotent.core.task.publish.put_back import RequeuePause

        pause = RequeuePause(self, self.request, host.began_at if host else monotonic())
        retry = None
        while True:
            try:
                retry = super().retry(*args, **options)
                return retry
            except Retry as raised:
                retry = raised
                raise
            except Reject as rejected:
                if in_shadow or isinstance(rejected.reason, EncodeError):
                    raise  # as Celery does; such arguments can never be published
                if isinstance(rejected.reason, _WRONG_OPTION):
                    raise rejected.reason from None  # nor can such options
                if not pause.wait(rejected.reason):
                    requeued = Reject(rejected.reason, requeue=True)
                    if host is not None:
                        host.ending = requeued
                    raise requeued from None
            finally:
                if retry is not None and host is not None and not self.request.is_eager:
                    host.retry_published(retry)

    def signature_from_request(
        self, request: Context | None = None, *args: Any, **options: Any
    ) -> Signature:
        """Returns the signature of a retry, as Celery does, with the key of the message."""
        request = self.request if request is None else request
        host, in_shadow = _host_of(request), self.idempotency_configuration.in_shadow
        if in_shadow and host is None:
            return super().signature_from_request(request, *args, **options)
        from celery_idempotent.core.task.publish import message_copy

        key, new_headers = host.call.key if host else None, options.get("headers")
        try:
            options["headers"] = message_copy.retry_headers(
                self.name, id_text(request.id), request.headers, new_headers, key
            )
        except IdempotencyError as error:
            if not in_shadow:
                raise
            logger.debug("%s: in shadow: the retry has no key: %s", key, error)
        if in_shadow:
            return super().signature_from_request(request, *args, **options)
        if host is not None:
            request.idempotency_headers_again = options["headers"]
        options = message_copy.adapt_to_delayed_delivery(self.app, request, options)
        signature = super().signature_from_request(request, *args, **options)
        message_copy.copy_properties(signature, request, options)
        return signature

    def replace(self, sig: Signature) -> Any:
        """Replaces the task with `sig`, as Celery does; the key gets the outcome of `sig`."""
        host = _host_of(self.request)
        if host is None:
            return super().replace(sig)
        from celery_idempotent.core.task.publish.replacement import replace_by

        replacement = replace_by(sig, host.call, host.request)
        try:
            return super().replace(sig)
        except Ignore as ignore:
            # Celery raises Ignore after it has published the replacement.
            host.replaced = replacement
            if not self.idempotency_configuration.in_shadow:
                host.ending = ignore
            raise

    def on_replace(self, sig: Signature) -> Any:
        """Publishes `sig`, as Celery does; with a transaction, once that is committed."""
        host = _host_of(self.request)
        if host is not None and not self.request.is_eager:
            for extension in host.call.extensions:
                if extension.replacing(sig.delay):
                    raise Ignore("Replaced by new task")
        return super().on_replace(sig)

    def idempotency_record(self, *args: Any, **kwargs: Any) -> Record | None:
        """Returns the record of a call with these arguments; None if there is none.

        Only the arguments that the key rule reads are needed: ``idempotency_record(order_id=42)``.
        ``idempotency_key=`` selects the record of a call with that explicit key. With the rule
        TASK_ID, the only argument is the task id.

        Raises:
            CorruptRecordError: if the record cannot be read.
            StoreUnavailableError: if Redis does not reply.
        """
        key = self.idempotency_key_of(*args, **kwargs)
        return run_sync(self.idempotency_configuration.executor.store.get(key))

    def idempotency_forget(self, *args: Any, force: bool | None = None, **kwargs: Any) -> bool:
        """Deletes the record of a call with these arguments; returns whether there was one.

        The next call runs. Copies of messages that have ended in an error still get that error.
        If the task has a transaction, this also deletes the row of the call in its database.

        Args:
            force: also forget a running call. It is not stopped, another execution can begin beside
                it, and its outcome will be refused.

        Raises:
            ConflictError: if the call is running, or its record has changed meanwhile.
            StoreUnavailableError: if Redis or the database does not reply.
            TypeError: if the task has a parameter ``force``, too.
        """
        configuration = self.idempotency_configuration
        if force is not None and "force" in configuration.rule.signature.parameters:
            raise TypeError(
                f"{self.name}: the task also has a parameter force: pass its arguments by position,"
                " and forget a running call with `celery idempotency forget --force`"
            )
        key = self.idempotency_key_of(*args, **kwargs)
        from celery_idempotent.core.flow.forget import forget

        return forget(configuration.executor, configuration.settings, key, force=bool(force))

    def idempotency_key_of(self, *args: Any, **kwargs: Any) -> Key:
        """Returns the key of a call with these arguments; its ``str()`` is `Record.key`.

        Only the arguments that the key rule reads are needed. ``idempotency_key=`` selects a call
        with that explicit key, regardless of its arguments.

        Raises:
            KeyRuleError, TypeError: if the key rule or the task's signature does not accept them.
        """
        configuration = self.idempotency_configuration
        if "idempotency_key" in kwargs:
            return configuration.rule.of_text(message_form(self.name, kwargs["idempotency_key"]))
        if configuration.rule.source is TASK_ID:
            if len(args) != 1 or kwargs or not isinstance(args[0], str):
                raise TypeError(f"{self.name}: its key is the task id: pass only that, result.id")
            return configuration.rule.derive((), {}, task_id=args[0])
        return configuration.rule.find(args, kwargs)


# The loggers of the consumer and of the tracer, by their names in every version of Celery.
logging.getLogger("celery.worker.strategy").addFilter(celery_log.is_first)
logging.getLogger("celery.app.trace").addFilter(celery_log.edit)
