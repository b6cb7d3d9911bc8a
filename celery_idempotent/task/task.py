"""The task base class."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from celery import Celery, Task
from celery.app.task import Context
from celery.canvas import Signature
from celery.exceptions import Ignore, Reject, Retry
from celery.result import AsyncResult, EagerResult
from celery.utils import uuid
from kombu.exceptions import EncodeError

from celery_idempotent.configuration import configuration
from celery_idempotent.configuration.configuration import TaskConfiguration
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.executor.execution import Execution, unprotected
from celery_idempotent.key.key import Key
from celery_idempotent.key.rule import TASK_ID
from celery_idempotent.record.record import Record
from celery_idempotent.task import (
    canvas,
    current_call,
    handlers,
    map_item,
    message_headers,
    publish,
    republish,
)
from celery_idempotent.task.call import TaskCall
from celery_idempotent.task.key_resolution import resolve_key
from celery_idempotent.task.message_headers import MessageHeaders
from celery_idempotent.task.requeue import RequeuePause


class IdempotentTask(Task):
    """A task whose duplicates get the first one's outcome instead of an execution.

    ``@app.task(base=IdempotentTask, idempotency_key="order:{order_id}")``. Every option is an
    attribute of the task, and a Celery setting of the same name is the default for all tasks;
    None means the setting. Durations are in seconds, sizes in bytes.
    """

    abstract = True

    # The record makes a second delivery safe, and without one a crash would lose the task.
    acks_late = True
    reject_on_worker_lost = True

    #: A refusal is a sentence in the log, without a traceback.
    throws = (IdempotencyError,)

    #: Sees, in the worker's main process, how a pool child ends.
    Request = "celery_idempotent.task.request:IdempotentRequest"

    idempotency_enabled: bool | None = None
    idempotency_key: Any = None
    idempotency_lease: float | None = None
    idempotency_result_ttl: float | None = None
    idempotency_error_ttl: float | None = None
    idempotency_replay_errors: tuple[type[BaseException], ...] | None = None
    idempotency_on_conflict: str | None = None
    idempotency_wait_timeout: float | None = None
    idempotency_max_attempts: int | None = None
    idempotency_on_store_error: str | None = None
    idempotency_on_lease_lost: str | None = None
    idempotency_dedupe_publish: bool | None = None
    idempotency_store_result: bool | None = None
    idempotency_serializer: str | None = None
    idempotency_compression: str | None = None
    idempotency_compression_threshold: int | None = None
    idempotency_encryption_keys: Any = None
    idempotency_max_result_size: int | None = None
    idempotency_offload_backend: str | None = None
    idempotency_redis_url: str | None = None
    idempotency_key_prefix: str | None = None
    idempotency_redis_options: Mapping[str, Any] | None = None
    idempotency_redis_client: Any = None
    idempotency_redis_timeout: float | None = None
    idempotency_redis_connect_timeout: float | None = None
    idempotency_wait_replicas: int | None = None
    idempotency_wait_replicas_timeout: float | None = None
    idempotency_wait_aof: bool | None = None
    idempotency_breaker_threshold: int | None = None
    idempotency_breaker_max_delay: float | None = None
    idempotency_on_store_unavailable_at_start: str | None = None

    _configuration: TaskConfiguration | None = None

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Refuse wrong options as soon as the app knows the task."""
        super().on_bound(app)
        cls._configuration = None
        if cls.name is not None:
            configuration.check(cls, app)
        handlers.wrap_handlers(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """From a worker: pass the gate. From anywhere else: a plain function call."""
        request = self.request_stack.top
        # `_protected` is Celery's own mark that a request has reached its body: a call of the task
        # from inside the task is a plain one again.
        if request is None or request.called_directly or request._protected:  # noqa: SLF001
            message = map_item.message_under_way()
            if message is None:
                return super().__call__(*args, **kwargs)
            try:
                return self._execute(message, args, kwargs, map_item.next_item_id(message))
            except map_item.MapItemIgnoredError:
                return None
        request._protected = 1  # noqa: SLF001
        return self._execute(request, args, kwargs)

    def _execute(
        self,
        request: Context,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        item_id: str | None = None,
    ) -> Any:
        if request.headers:
            # The body may pass them on: a key that was published by name is not bound yet.
            request.headers = message_headers.bind(self.name, request.id, request.headers)
        request.idempotency_without_body = True
        key, headers = resolve_key(
            self, request.id, request.headers, args, kwargs, request=request, item_id=item_id
        )
        if key is None:
            request.idempotency_without_body = False
            if item_id is not None:
                return super().__call__(*args, **kwargs)
            current_call.stop_deferring_soft_limit(request)
            self.before_start(request.id, args, kwargs)
            return self.run(*args, **kwargs)
        configuration = self._configuration or self.idempotency_configuration
        new_call = TaskCall if item_id is None else map_item.MapItemCall
        call = new_call(
            self, request, args, kwargs, key, headers, configuration.settings, item_id or request.id
        )
        return current_call.run_in_executor(
            configuration.executor, call, eager=bool(request.is_eager)
        )

    @property
    def idempotency(self) -> Execution:
        """The execution under way; in a plain call one that nothing protects.

        Raises:
            IdempotencyError: in a thread that the body has started without its context: take the
                execution in the body, and hand it to the thread.
        """
        request = self.request_stack.top
        call = current_call.call_in_context(self) if request is None else TaskCall.of(request)
        return unprotected() if call is None or call.execution is None else call.execution

    @property
    def idempotency_configuration(self) -> TaskConfiguration:
        """The task's settings, key rule and gate, as they were at first use.

        Raises:
            ImproperlyConfigured: if an option is wrong.
        """
        cls = type(self)
        if cls._configuration is None:
            cls._configuration = TaskConfiguration(cls, self.app)
        return cls._configuration

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
        """As Celery's, with ``idempotency_key``: this call's own key, or False for no gate.

        Under ``idempotency_dedupe_publish`` a call whose key is in flight or done publishes
        nothing, and gives the first one's result.

        Raises:
            KeyRuleError: if `idempotency_key`, or the task's rule, gives no key.
            KeyReusedError: if publishing is deduplicated, and the key came with other arguments.
        """
        task_id = task_id or uuid()
        options = self._with_own_key(task_id, options) | {"link": link, "link_error": link_error}
        publish_now = super().apply_async

        def send(options: dict[str, Any]) -> AsyncResult:
            return publish_now(args, kwargs, task_id, producer, shadow=shadow, **options)

        return publish.publish(self, args, kwargs, task_id, options, send)

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> EagerResult:
        """As Celery's, with ``idempotency_key``; the gate stands before an eager run too."""
        options["task_id"] = options.get("task_id") or uuid()
        return super().apply(args, kwargs, **self._with_own_key(options["task_id"], options))

    def _with_own_key(self, task_id: str, options: dict[str, Any]) -> dict[str, Any]:
        key, headers = options.pop("idempotency_key", None), options.get("headers")
        if key is not None:
            options["headers"] = message_headers.with_explicit_key(self.name, task_id, headers, key)
        elif headers:
            options["headers"] = message_headers.bind(self.name, task_id, headers)
        return options

    def retry(self, *args: Any, **options: Any) -> Any:
        """As Celery's, which drops the message where the retry cannot be published.

        This leaves it with the broker: the task runs again, if earlier than it wished.
        """
        call = TaskCall.of(self.request)
        pause = RequeuePause(self, self.request, call.began_at if call else monotonic())
        retry = None
        while True:
            try:
                retry = super().retry(*args, **options)
                return retry
            except Retry as raised:
                retry = raised
                raise
            except Reject as dropped:
                if isinstance(dropped.reason, EncodeError):
                    raise  # no message can carry these arguments, today or tomorrow
                if not pause.wait(dropped.reason):
                    raise Reject(dropped.reason, requeue=True) from None
            finally:
                if retry is not None and call is not None and not self.request.is_eager:
                    call.retry_published(retry)

    def signature_from_request(
        self, request: Context | None = None, *args: Any, **options: Any
    ) -> Signature:
        """As Celery's; the message keeps all that it came with, and carries its derived key."""
        request = self.request if request is None else request
        call = TaskCall.of(request)
        given = options.get("headers")
        if MessageHeaders.read(self.name, request.id, given).key is None:
            headers = message_headers.for_retry(self.name, request.id, request.headers, given)
            if call is not None:
                headers = message_headers.with_derived_key(headers, call.key, request.id)
            options["headers"] = headers
        options = republish.adapt_to_delayed_delivery(self.app, request.delivery_info, options)
        message = super().signature_from_request(request, *args, **options)
        republish.copy_properties(message, request, options)
        return message

    def replace(self, sig: Signature) -> Any:
        """As Celery's; the key's outcome is then what the replacement returns under this id."""
        call = TaskCall.of(self.request)
        if call is None:
            return super().replace(sig)
        canvas.mark_replaced(sig, call.key, self.request)
        end = canvas.last_signature(sig)
        told = end is None or not canvas.ignores_result(end) or self._has_key(end, call.key)
        try:
            return super().replace(sig)
        except Ignore:
            # The replacement is on its way. One that could not be sent is an error like any other.
            call.replaced_by_canvas(told)
            raise

    def _has_key(self, sig: Signature, key: Key) -> bool:
        """Whether `sig`, under this task's id, is going to complete `key`."""
        if sig.task != self.name:
            return False
        try:
            task_id = self.request.id
            headers = self._with_own_key(task_id, dict(sig.options)).get("headers")
            own, _ = resolve_key(self, task_id, headers, sig.args, sig.kwargs, request=self.request)
        except (IdempotencyError, TypeError):
            return False  # its own execution will raise the error
        return own is not None and own.digest == key.digest

    def idempotency_record(self, *args: Any, **kwargs: Any) -> Record | None:
        """The record of a call with these arguments, or None if there is none.

        ``idempotency_key=`` names a record by the key that its call carried. Under the rule
        TASK_ID the one argument is the task's id.

        Raises:
            CorruptRecordError: if the record cannot be read.
            StoreUnavailableError: if Redis cannot be asked.
        """
        return self.idempotency_configuration.executor.store.get(
            self.idempotency_key_of(*args, **kwargs)
        )

    def idempotency_forget(self, *args: Any, **kwargs: Any) -> bool:
        """Drop the record of a call with these arguments: the next one runs. True if there was one.

        Errors of ended task ids go with it, or alone: they are no record. A message of such a task
        id then runs, too.

        An execution under way is not stopped; its outcome will be refused.

        Raises:
            StoreUnavailableError: if Redis cannot be asked.
        """
        key = self.idempotency_key_of(*args, **kwargs)
        return self.idempotency_configuration.executor.forget(key) == "ok"

    def idempotency_key_of(self, *args: Any, **kwargs: Any) -> Key:
        """The key of a call with these arguments; ``str()`` of it is `Record.key`.

        Raises:
            KeyRuleError: if the rule gives none for them.
        """
        configured = self.idempotency_configuration
        if "idempotency_key" in kwargs:
            return configured.rule.of_text(kwargs["idempotency_key"])
        if configured.settings.key is TASK_ID:
            (task_id,) = args
            return configured.rule.derive((), {}, task_id=task_id)
        return configured.rule.derive(args, kwargs)
