"""Delivers messages in this process, with the function that a pool child calls.

And a signal at any line of the package that a delivery comes by.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from uuid import uuid4

from celery import Celery
from celery.app.trace import trace_task_ret
from celery.exceptions import Ignore, Reject
from celery.worker.request import Request

import celery_idempotent
from celery_idempotent import IdempotentTask
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import Harness

PACKAGE = str(Path(celery_idempotent.__file__).parent)


class End(NamedTuple):
    """How a delivery ended for Celery."""

    #: ``success``, ``failure``, ``ignored``, ``requeued`` or ``dropped``.
    state: str
    error: BaseException | None = None


class Deliveries:
    """Publishes and delivers the messages of `task`."""

    def __init__(self, app: Celery, task: IdempotentTask) -> None:
        self.app = app
        self.task = task
        self._channel = app.connection_for_read().default_channel

    def publish(self, *args: Any, **options: Any) -> Request:
        """Publishes a message and returns it as the worker receives it."""
        self.task.apply_async(args, **options)
        return self.received()

    def delivered(self, *args: Any, **options: Any) -> Request:
        """Publishes a message, delivers it and returns it."""
        message = self.publish(*args, **options)
        self.deliver(message)
        return message

    def received(self) -> Request:
        """The message in the broker."""
        message = self.next()
        assert message is not None
        return message

    def purge(self) -> None:
        """Removes the messages in the broker, which all apps of a process share."""
        self._channel.queue_purge("celery")

    def next(self) -> Request | None:
        """The message in the broker, or None."""
        message = self._channel.basic_get("celery", no_ack=True)
        if message is None:
            return None
        return Request(message, app=self.app, task=self.task, hostname="here")

    def deliver_all(self) -> None:
        """Delivers what is in the broker, until nothing is."""
        for _ in range(20):
            message = self.next()
            if message is None:
                return
            self.deliver(message)
        raise AssertionError("the messages come back for ever")

    def deliver(self, message: Request) -> End:
        """Runs the message; its outcome is in the result backend."""
        body = message.body, message.content_type, message.content_encoding
        headers = dict(message.request_dict)
        failed, result, _ = trace_task_ret(message.type, message.id, headers, *body, app=self.app)
        if not failed:
            return End("success")
        error = result.exception
        error = getattr(error, "exc", error)
        if isinstance(error, Ignore):
            return End("ignored", error)
        if isinstance(error, Reject):
            return End("requeued" if error.requeue else "dropped", error)
        return End("failure", error)


def record_of(task: IdempotentTask, *args: Any) -> Harness:
    """The record of a call."""
    store = task.idempotency_configuration.executor.store
    return Harness(store, store.client, task.idempotency_key_of(*args))


def begin_elsewhere(task: IdempotentTask, order: str) -> int:
    """Begins an execution of the key in another worker; returns its token."""
    begun = record_of(task, order).begin(task_id="the other", worker="elsewhere/1")
    assert begun.case == "begun"
    return begun.token


class SignalAtLine:
    """Sends this process a signal at the `at`-th line of the package that is executed.

    Except at the end of a lock's ``with`` block: Python runs no signal handler between the last
    instruction and the release, which is written in C; only a trace function can raise there.
    """

    def __init__(
        self, at: int, number: int = signal.SIGUSR1, files: tuple[str, ...] = (PACKAGE,)
    ) -> None:
        self._at = at
        self._files = files
        self._number = number
        self._seen: set[tuple[str, int]] = set()
        #: Where the signal was sent: a file of the package, a function, and a line number.
        self.where = ""

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            if place not in self._seen:
                self._seen.add(place)
                if len(self._seen) == self._at:
                    name = place[0].removeprefix(PACKAGE + "/")
                    self.where = f"{name}::{frame.f_code.co_name}:{place[1]}"
                    sys.settrace(None)
                    signal.raise_signal(self._number)
        return self._trace

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Counts lines while the block runs."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)


ROOT = Path(__file__).parents[2]

#: The commands of a run, without those inside the scripts.
FUSED = ["EVALSHA", "EVALSHA"]
BY_CELERY = [*FUSED, "GET", "MULTI", "SETEX", "PUBLISH", "EXEC"]

Offer = Callable[..., Deliveries]
Make = Callable[..., IdempotentTask]


def pay(self: Any, order: str) -> Any:
    if order == "add to the chain":
        self.add_to_chain(self.si("next"))
    return {"receipt": order}


def receipt(self: Any, order: str) -> str:
    return uuid4().hex


def long_text(self: Any, order: str) -> str:
    return order * 100


@contextmanager
def recorded(server: RedisServer) -> Iterator[list[str]]:
    """Yields a list, which gets the commands that clients send to the server in the block."""
    commands: list[str] = []
    with server.client() as client, client.monitor() as monitor:
        client.ping()  # connects
        while monitor.next_command()["command"] != "PING":
            pass
        yield commands
        client.echo("end")
        while (received := monitor.next_command())["command"] != "ECHO end":
            name = received["command"].partition(" ")[0].upper()
            # Results that nobody waits for any more are unsubscribed from at any time.
            if received["client_type"] != "lua" and not name.endswith("SUBSCRIBE"):
                commands.append(name)


def sent_by(server: RedisServer, deliveries: Deliveries, **options: Any) -> list[str]:
    """Returns what a delivery sends once all connections are open and all scripts are loaded."""
    deliveries.deliver(deliveries.publish("warm-up", **options))
    message = deliveries.publish("order", **options)
    with recorded(server) as sent:
        assert deliveries.deliver(message).state == "success"
    return sent


def meta_of(deliveries: Deliveries, task_id: str) -> dict[str, Any]:
    """Returns what the result backend has, as every reader decodes it."""
    deliveries.app.backend._cache.clear()
    meta: dict[str, Any] = deliveries.app.backend.get_task_meta(task_id)
    return meta
