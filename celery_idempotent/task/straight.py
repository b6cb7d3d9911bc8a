"""The straight line: takes the most common messages of a task to their end in few function calls.

It does the same as the flow (:mod:`celery_idempotent.flow.flow`), for a message without a
continuation that runs at its first attempt and returns a value, or that gets such a value as a
duplicate. Its commands are templates, made from those of the flow. It applies no policy. All
other messages go to the flow before anything is sent. The flow also continues a call after any
other reply to its begin, and settles one whose body raised an error or used ``self.idempotency``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from json import dumps
from typing import Any
from weakref import ref

from celery import Task
from celery.app.task import Context
from celery.states import SUCCESS
from celery.utils import uuid
from kombu.serialization import registry
from kombu.utils import json

from celery_idempotent.clock import monotonic as process_clock
from celery_idempotent.configuration.configuration import TaskConfiguration
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.events import table
from celery_idempotent.events.report import report
from celery_idempotent.flow.active_call import EXECUTION_ID_BYTES, begin_command
from celery_idempotent.flow.flow import give_back
from celery_idempotent.flow.outcome import Failure, Outcome, Result
from celery_idempotent.flow.soft_limit import BODY, FLOW, SoftLimit
from celery_idempotent.flow.thread import run_flow
from celery_idempotent.key.key import FINGERPRINT_BYTES, ROOT_BYTES, Key, default_root
from celery_idempotent.lease.clock import lease_now
from celery_idempotent.lease.lease import Lease
from celery_idempotent.record import layout, traceparent
from celery_idempotent.record.payload import Payload
from celery_idempotent.record.record import Record, State
from celery_idempotent.store import commands, reference
from celery_idempotent.store.commands import BackendResult, LeaseExtension
from celery_idempotent.task import call_options, message_headers
from celery_idempotent.task.call import (
    TaskCall,
    call_of_context,
    result_written,
    running,
    soft_limit_of,
)

logger = logging.getLogger(__name__)


def line_of(task: Task, configuration: TaskConfiguration, request: Context) -> Line | None:
    """Returns the line of `task` in this process; None if its messages need the flow."""
    process = os.getpid(), request.hostname
    if configuration.line[0] != process:
        try:
            line = Line(task, configuration, request)
        except Exception as error:
            logger.debug("%s: every message takes the flow: %s", task.name, error)
            line = None
        configuration.line = process, line
    made: Line | None = configuration.line[1]
    return made


class Line:
    """The templates of commands that the messages of one task share in this process.

    Raises:
        ValueError: if the task's options, its store or its result backend need the flow.
    """

    def __init__(self, task: Task, configuration: TaskConfiguration, request: Context) -> None:
        self.configuration, settings = configuration, configuration.settings
        if (
            not settings.enabled
            or configuration.in_shadow
            or configuration.plan.extensions
            or configuration.label
            or settings.runs_again
            or not settings.store_result
            or settings.serializer != "json"
            or settings.compression
            or settings.encryption_keys
            or task._own_call  # noqa: SLF001
        ):
            raise ValueError("an option of the task needs the flow")
        if registry._encoders["json"].encoder is not json.dumps:  # noqa: SLF001
            raise ValueError("the project has registered a JSON encoder of its own")
        self.store, self.backend = configuration.executor.store, task.backend
        self.runtime = configuration.executor.runtime
        self.writes_result = not configuration.fusion_obstacle

        key = Key.of(task.name, os.urandom(8), os.urandom(FINGERPRINT_BYTES))
        task_id, root, token = uuid(), os.urandom(ROOT_BYTES), 10**15
        digest, body = key.digest.encode(), b"the value of the body"
        headers = message_headers.MessageHeaders(root=root)
        message = Context(id=task_id, hostname=request.hostname)
        sample = TaskCall(task, configuration, message, (), {}, key, headers).active
        names = digest, digest, root.hex().encode()
        others = sample.execution_id, layout.write_task_id(task_id), root, key.fingerprint
        self.begin = self.store.template(begin_command(sample), *names, *others)
        about = key, token, Payload("json", body), settings.result_ms
        if not self.writes_result:
            complete = commands.complete(*about)
            self.complete = self.store.template(complete, digest, b"%d" % token, body)
            return
        self._now = self._checked_clock()
        name, meta = self.backend.get_key_for_task(task_id), b"the stored result"
        result = BackendResult(name, meta, self.backend.expires or 0)
        complete, write_result = commands.complete(*about, result), commands.write_result
        self.complete = self.store.template(complete, digest, name, b"%d" % token, body, meta)
        self.write_result = self.store.template(write_result(key, result), digest, name, meta)
        record = Record(State.COMPLETED, str(key), task.name, uuid(), "", token, 1, at_ms=10**12)
        refer = reference.command(self.store.config.prefix, task_id, record, reference.REPLAYED, 0)
        _, name, body, _, expires_at = refer
        self.refer = self.store.template(refer, name.encode(), body, b"%d" % expires_at)

    def result_of(self, request: Context, text: str) -> tuple[bytes, bytes]:
        """Returns the name and the bytes of a result, as Celery's Redis backend stores it.

        Args:
            text: the value as JSON.
        """
        group = f', "group_id": {dumps(request.group)}' if request.group else ""
        parent = f', "parent_id": {dumps(request.parent_id)}' if request.parent_id else ""
        meta = (
            f'{{"status": "SUCCESS", "result": {text}, "traceback": null, "children": [], '
            f'"date_done": "{self._now().isoformat()}"{group}{parent}, '
            f'"task_id": {dumps(request.id)}}}'
        )
        return self.backend.get_key_for_task(request.id), meta.encode()

    def _checked_clock(self) -> Callable[[], datetime]:
        """Checks that :meth:`result_of` writes as the result backend does; returns its clock.

        Raises:
            ValueError: if the backend's version, serializer or options lead to another form.
        """
        request = Context(id=uuid(), group=uuid(), parent_id=uuid(), children=[])
        meta = self.backend._get_result_meta("a", SUCCESS, None, request)  # noqa: SLF001
        meta["task_id"] = request.id
        date_done = datetime.fromisoformat(meta["date_done"])
        self._now = lambda: date_done
        _, written = self.result_of(request, '"a"')
        app = self.backend.app
        # For the usual time zone, Celery's own clock takes several times as long.
        in_zone = _utc_now if str(app.timezone) == "UTC" else app.now
        clock: Callable[[], datetime] = in_zone if date_done.tzinfo else _naive_now
        is_now = abs(clock() - date_done) < timedelta(seconds=10)
        if not is_now or self.backend.encode(meta).encode() != written:
            raise ValueError("the result backend stores results in another form")
        return clock

    def call_of(
        self, task: Task, request: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StraightCall | None:
        """Returns the call of a message; None if the message needs the flow or is refused."""
        headers = request.headers
        if (
            request.is_eager
            or type(request.id) is not str
            or request.retries
            or request.replaced_task_nesting
            or request.callbacks
            or request.chain
            or request.chord
            or request.errbacks
            or (request.ignore_result and self.writes_result)
            or traceparent.current is not None
        ):
            return None
        if call_options.names_any((*(headers or ()), *(request.properties or ()), *kwargs)):
            return None
        root = message_headers.only_root(task.name, request.id, headers) if headers else b""
        if root is None:
            return None
        try:
            key = self.configuration.rule.derive(args, kwargs, task_id=request.id)
            root = root or default_root(request.id)
            return StraightCall(self, task, request, (args, kwargs), key, root)
        except (IdempotencyError, TypeError):
            return None


class StraightCall:
    """One message; makes its `TaskCall` when that is needed."""

    #: As `ActiveCall` has them, for reports.
    label = decision = ""
    token, attempt = 0, 1
    lease: Lease | None = None
    #: Of the body, or of the record in a replay.
    outcome: Outcome | None = None
    #: Nothing is left to do in Redis.
    settled = False
    #: As `TaskCall` has it.
    active = None
    _reply: bytes | None = None

    def __init__(
        self, line: Line, task: Task, request: Context, arguments: Any, key: Key, root: bytes
    ) -> None:
        self._line, self.sender = line, task
        # Weak, since the request refers to its call: only the garbage collector would free them.
        self._request_ref = ref(request)
        self._arguments, self.key, self._root = arguments, key, root
        self.task_id: str = request.id
        self._stored_id = layout.write_task_id(self.task_id)
        self._execution_id = os.urandom(EXECUTION_ID_BYTES)
        self._began_at, self._sent_at = process_clock(), lease_now()

    @property
    def in_flow(self) -> TaskCall:
        """The call in the flow, at the point which this one has reached."""
        made: TaskCall | None = vars(self).get("_in_flow")
        if made is None:
            # Atomic, since threads of the body may need it at the same time.
            made = vars(self).setdefault("_in_flow", self._make())
        return made

    @property
    def _request(self) -> Context:
        request = self._request_ref()
        if request is None:
            raise IdempotencyError(f"the message of {self.sender.name} has ended")
        return request

    def _make(self) -> TaskCall:
        headers = message_headers.MessageHeaders(root=self._root)
        configuration, (args, kwargs) = self._line.configuration, self._arguments
        request = self._request
        request.id = self.task_id  # which the body may have changed
        call = TaskCall(self.sender, configuration, request, args, kwargs, self.key, headers)
        call.began_at, active = self._began_at, call.active
        active.execution_id, active.decision = self._execution_id, self.decision
        if self.lease is not None:
            call.execution = active.resume(self.lease)
        elif self._reply is not None:
            active.early_reply = self._sent_at, self._reply
        else:
            active.first_sent_at = self._sent_at
        return call

    @property
    def execution(self) -> Any:
        """The execution, once it has begun."""
        return self.in_flow.execution if self.lease is not None else None

    def execute(self) -> Any:
        """Takes the message through begin, body and completion; returns or raises its outcome."""
        request, outer_call = self._request, call_of_context.get()
        limit = soft_limit_of(request)
        try:
            limit.enter()
            call_of_context.set(self)
            running.add(self)
            request.idempotency_call = self
            has_ended = self._begin(request) and (self.settled or self._run(request, limit))
        except BaseException as error:
            limit.phase = FLOW
            limit.leave()
            return self._end_interrupted(error)
        finally:
            limit.leave()
            request.id = self.task_id  # which the body may have changed
            running.discard(self)
            call_of_context.set(outer_call)
        if has_ended:
            assert isinstance(self.outcome, Result)
            return self.outcome.value
        return self._go_on()

    def _begin(self, request: Context) -> bool:
        """Sends the begin; returns whether the message may run or has ended."""
        line, root, fingerprint = self._line, self._root, self.key.fingerprint
        digest = self.key.digest.encode()
        slots: list[Any] = [digest, digest, root.hex().encode()]
        for argument in (self._execution_id, self._stored_id, root, fingerprint):
            slots += len(argument), argument
        replies = line.store.send_packed(line.begin.render(tuple(slots)))
        if not replies:
            return False
        self._reply = replies[0]
        case, _, _, raw = self._reply.split(b" ", 3)
        if table.BEGIN_REPLIED.signal.receivers:
            seconds = lease_now() - self._sent_at
            report(table.BEGIN_REPLIED, self, case=case.decode(), seconds=seconds)
        if case == b"finished":
            return line.writes_result and self._replay(request, raw)
        return case == b"begun" and self._grant(raw)

    def _grant(self, raw: bytes) -> bool:
        line, settings, begun = self._line, self._line.configuration.settings, layout.begun(raw)
        extension = LeaseExtension(self.key, begun.token, settings.lease_ms, settings.result_ms)
        lease = Lease(line.store, extension, self._sent_at, self._report_lease_lost)
        if begun.attempt > 1 or begun.body or not lease.trusted:
            return False
        self.token, self.lease = begun.token, lease
        line.runtime.start_renewal(lease)
        report(table.BEGUN, self, self)
        report(table.RUN, self)
        return True

    def _run(self, request: Context, limit: SoftLimit) -> bool:
        """Runs the body and stores its value; returns False if the flow has to continue."""
        args, kwargs = self._arguments
        try:
            limit.phase = BODY
            if limit.error is None:  # else the limit was reached before
                request.idempotency_without_body = False
                self.sender.before_start(self.task_id, args, kwargs)
                self.outcome = Result(self.sender.run(*args, **kwargs))
            limit.phase = FLOW
        except BaseException as error:
            limit.phase = FLOW
            self.outcome = self.outcome or Failure(error)
        request.id = self.task_id
        return self._complete(request)

    def _complete(self, request: Context) -> bool:
        outcome, line = self.outcome, self._line
        if (
            not isinstance(outcome, Result)
            or "_in_flow" in vars(self)
            or (request.ignore_result and line.writes_result)
            or request.children
            or request.callbacks
            or request.chain
            or request.chord
        ):
            return False
        try:
            # As kombu encodes it, except for types that only kombu knows.
            text = dumps(outcome.value)
            body, token = text.encode(), b"%d" % self.token
            name, meta = line.result_of(request, text) if line.writes_result else (b"", body)
        except Exception:
            return False
        if len(meta) > line.configuration.settings.max_result_size:
            return False
        slots: Any = (len(token), token, len(body), body)
        if line.writes_result:
            slots = len(name), name, *slots, len(meta), meta
        packed = line.complete.render((self.key.digest.encode(), *slots))
        replies = line.store.send_packed(packed)
        case = replies[0].partition(b" ")[0] if replies else b""
        if case not in (b"ok", b"written"):
            return False
        assert self.lease is not None
        line.runtime.stop_renewal(self.lease)
        self.settled = True
        report(table.COMPLETED, self, self, end="its result is stored")
        if case == b"written":
            result_written.set(self)
        return True

    def _replay(self, request: Context, raw: bytes) -> bool:
        """Answers with the outcome of another message; returns False if the flow has to."""
        line, settings = self._line, self._line.configuration.settings
        try:
            record = line.store.record(self.key, raw)
            if record.state is not State.COMPLETED or record.format != "json":
                return False
            text = record.body.decode()
            value = json.loads(text)
            name, meta = line.result_of(request, text)
        except Exception:
            return False  # the flow reports the error
        if record.task_id == self.task_id or len(meta) > settings.max_result_size:
            return False
        slots: Any = self.key.digest.encode(), len(name), name, len(meta), meta
        packed = line.write_result.render(slots)
        name = reference.name(line.store.config.prefix, self.task_id).encode()
        body = reference.write(record, reference.REPLAYED)
        expires_at = b"%d" % (record.at_ms + settings.result_ms)
        slots = len(name), name, len(body), body, len(expires_at), expires_at
        replies = line.store.send_packed(packed + line.refer.render(slots), 2)
        if not replies:
            return False
        self.outcome, self.settled = Result(value), True
        report(table.REPLAYED, self, record=record)
        if replies[0].startswith(b"written"):
            result_written.set(self)
        return True

    def _go_on(self) -> Any:
        call = self.in_flow
        call.active.outcome = self.outcome
        self._request.idempotency_call = call
        return call.execute()

    def _end_interrupted(self, error: BaseException) -> Any:
        """Ends the message as the flow does after a signal handler has raised `error`."""
        if self.settled:
            raise error
        active = self.in_flow.active
        if self.outcome is None:
            # If a begin was sent, Redis recognizes its execution id.
            active.early_reply, active.unanswered = None, self.lease is None
            run_flow(partial(give_back, active, error), soft_limit_of(self._request))
            self.in_flow.return_to_queue(error)
            raise error
        active.writes_once = not isinstance(error, Exception)
        value = self._go_on()
        if active.writes_once:
            raise error
        active.report(table.ENDED_LATE, error=error)
        return value

    def _report_lease_lost(self, raw: bytes) -> None:
        self.in_flow.active.report_lease_lost(raw)


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


def _naive_now() -> datetime:
    """Returns the time in UTC without an offset, the form of Celery up to 5.3."""
    return _utc_now().replace(tzinfo=None)
