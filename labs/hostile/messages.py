"""Takes messages from the broker through Celery's tracer, as a worker does: each call runs once."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.app.trace import build_tracer
from kombu import serialization

from celery_idempotent import IdempotentTask
from celery_idempotent.errors import IdempotencyError
from labs.hostile.arguments import Arguments, Generator, received, stable_repr
from tests.flow.deliveries import Deliveries

#: First arguments at which the task raises an error that is stored, is retried in an hour, or calls
#: `Worker.during`.
FAILS, RETRIES, CALLS = "fails", "retries", "calls"
NAME = "hostile.echo"


def worker(
    url: str, serializer: str = "json", broker: str = "memory://", **settings: Any
) -> Worker:
    """Returns a worker whose task returns its arguments."""
    app = Celery("hostile", broker=broker, backend=url, set_as_current=False)
    accepted = [serializer, "json"]
    app.conf.update(task_serializer=serializer, result_serializer=serializer, **settings)
    app.conf.update(accept_content=accepted, result_accept_content=accepted)
    runs: Counter[str] = Counter()
    options: Any = {"bind": True, "shared": False, "idempotency_replay_errors": (LookupError,)}

    @app.task(base=IdempotentTask, name=NAME, **options)  # type: ignore[untyped-decorator]
    def echo(self: Any, a: Any, b: Any = 0, *rest: Any, c: Any = None, **more: Any) -> Any:
        runs[self.idempotency.key] += 1
        if a == FAILS:
            raise LookupError(b)
        if a == RETRIES:
            raise self.retry(countdown=3600)
        if a == CALLS:
            receiver.during()
        return [a, b, rest, c, more]

    app.finalize()
    receiver = Worker(app, echo, runs)
    return receiver


class Worker:
    """Receives messages one at a time."""

    def __init__(self, app: Celery, task: Any, runs: Counter[str]) -> None:
        self.app, self.task, self.runs = app, task, runs
        self.during: Callable[[], object] = lambda: None
        self._deliveries = Deliveries(app, task)
        self._trace = build_tracer(task.name, task, app.loader, "hostile@here", app=app)

    def receive(
        self, args: Any, kwargs: Any, *, headers: Any = None, task_id: str = ""
    ) -> tuple[str, Any]:
        """Returns what the result backend has afterwards: the state, and the value or the error."""
        task_id = task_id or str(uuid.uuid4())
        request = {
            **dict.fromkeys(("callbacks", "errbacks", "chord", "chain")),
            "id": task_id,
            "root_id": task_id,
            "task": NAME,
            "args": args,
            "kwargs": kwargs,
            "retries": 0,
            "is_eager": False,
            "hostname": "hostile@here",
            "headers": headers or {},
            "properties": {},
            "delivery_info": {"exchange": "", "routing_key": "celery"},
        }
        self._trace(task_id, args, kwargs, request)
        return self._end(task_id)

    def publish(self, call: Arguments) -> tuple[str, Any]:
        """Publishes a call and receives its message twice; as :meth:`receive`."""
        self.task.apply_async(call.args, call.kwargs)
        message = self._deliveries.next()
        assert message is not None
        for _ in range(2):
            self._deliveries.deliver(message)
        return self._end(message.id)

    def _end(self, task_id: str) -> tuple[str, Any]:
        meta = self.app.backend.get_task_meta(task_id)
        self.app.backend.forget(task_id)
        return meta["status"], meta["result"]


class Verdict:
    def __init__(self) -> None:
        self.calls = self.runs = self.refused = 0
        self.failures: list[str] = []


def run(url: str, broker: str, serializer: str, calls: int, seed: int) -> Verdict:
    """Publishes each call twice, under two task ids, and delivers each message twice."""
    serialization.enable_insecure_serializers()
    receiver, generator, verdict = worker(url, serializer, broker), Generator(seed), Verdict()
    receiver.app.control.purge()  # of what other code in this process has published to memory://
    for _ in range(calls):
        call = generator.draw()
        if received(call, serializer) is None:
            continue
        verdict.calls += 1
        before = receiver.runs.total()
        first, second = (receiver.publish(call) for _ in range(2))
        ran = receiver.runs.total() - before
        if first[0] == "FAILURE" and isinstance(first[1], IdempotencyError) and not ran:
            verdict.refused += 1
        elif first[0] != "SUCCESS" or ran > 1 or stable_repr(first) != stable_repr(second):
            verdict.failures.append(f"{first!r}, then {second!r}, {ran} runs: {call!r}")
    verdict.runs = receiver.runs.total()
    verdict.failures += [f"{key} ran {n} times" for key, n in receiver.runs.items() if n > 1]
    return verdict
