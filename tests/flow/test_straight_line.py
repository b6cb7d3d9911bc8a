"""The straight line does what the flow does, also where a signal interrupts it."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from datetime import datetime, timezone
from decimal import Decimal
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import SplitResult
from uuid import UUID

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject
from freezegun import freeze_time
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu.serialization import register
from kombu.utils import json as kombu_json

from celery_idempotent import TASK_ID as BY_TASK_ID
from celery_idempotent import IdempotentTask, State, signals
from celery_idempotent.events import report
from celery_idempotent.flow.active_call import begin_command
from celery_idempotent.lease.heartbeat import heartbeat
from celery_idempotent.record import layout
from celery_idempotent.record.payload import Payload
from celery_idempotent.store import commands
from celery_idempotent.store.transport.server import pack
from celery_idempotent.task import call, straight
from tests.conftest import exhaustive_except
from tests.flow.deliveries import Deliveries, End, SignalAtLine, begin_elsewhere
from tests.servers.redis_server import RedisServer

pytestmark = pytest.mark.skipif(
    os.environ.get("STRAIGHT_LINE") == "off", reason="STRAIGHT_LINE is off"
)

OTHER_ID, TASK_ID = "0b0ee4b3-3bd5-44fd-8e6a-0c1b9b7bc1b1", "7c9e6679-7425-40de-944b-e07fc1f90ae7"
Make = Callable[..., IdempotentTask]


class Case(NamedTuple):
    """One message."""

    body: Callable[[IdempotentTask, str], Any] = lambda task, order: None
    #: Of the task.
    options: Mapping[str, Any] = MappingProxyType({})
    #: Of the publish.
    publish: Mapping[str, Any] = MappingProxyType({})
    #: What happens to the key before.
    before: Callable[[Deliveries], object] = lambda deliveries: None
    #: Whether the message ends on the line.
    straight: bool = True


def value(value: Any, *, straight: bool = True) -> Case:
    return Case(lambda task, order: value, straight=straight)


def raising(error: BaseException) -> Case:
    def body(task: IdempotentTask, order: str) -> None:
        raise error

    return Case(body, straight=False)


def replayed(value: Any, *, straight: bool = True, **options: Any) -> Case:
    """A duplicate of a call that has returned `value`."""

    def run(deliveries: Deliveries) -> None:
        deliveries.deliver(deliveries.publish("1", task_id=OTHER_ID))

    return Case(lambda task, order: value, before=run, straight=straight, **options)


def using(body: Callable[[IdempotentTask], Any]) -> Case:
    return Case(lambda task, order: body(task), straight=False)


def held(deliveries: Deliveries) -> None:
    begin_elsewhere(deliveries.task, "1")


def overwritten(deliveries: Deliveries) -> None:
    task = deliveries.task
    store = task.idempotency_configuration.executor.store
    store.client.set(store.name(task.idempotency_key_of("1")), b"damaged")


def used_with_other_arguments(deliveries: Deliveries) -> None:
    deliveries.deliver(deliveries.publish("1", 2, task_id=OTHER_ID))


def retried(task: IdempotentTask) -> None:
    task.retry(countdown=1)


def published_a_child(task: IdempotentTask) -> str:
    task.app.send_task("another", task_id=OTHER_ID)
    return "with a child"


CASES = {
    "nothing": Case(),
    "true": value(True),
    "a number": value(-1),
    "a fraction": value(1.5e300),
    "not a number": value(float("nan")),
    "text": value('é "quoted" \\ \u2028 💡'),
    "a list": value([1, ["2", None]]),
    "a tuple": value((1, (2,))),
    "a dict": value({"a": 1, "b": {"c": [None]}}),
    "a dict with a number as key": value({1: 2}),
    "a dict of kombu's form": value({"__type__": "x", "__value__": 1}),
    "a date": value(datetime(2026, 1, 2, tzinfo=timezone.utc), straight=False),
    "a decimal": value(Decimal("1.10"), straight=False),
    "a UUID": value(UUID(TASK_ID), straight=False),
    "no JSON": value(object(), straight=False),
    "too large": value("x" * 2_000_000, straight=False),
    "an error": raising(ValueError("no")),
    "an exit": raising(SystemExit(1)),
    "ignored": raising(Ignore()),
    "rejected": raising(Reject("no", requeue=False)),
    "a retry": using(retried),
    "its key": using(lambda task: str(task.idempotency.key)),
    "a step": using(lambda task: task.idempotency.step("one", lambda: 1)),
    "a check": using(lambda task: task.idempotency.check()),
    "a child": using(published_a_child),
    "a stored error": Case(
        raising(ValueError("no")).body, {"idempotency_replay_errors": (ValueError,)}, straight=False
    ),
    "a rule": Case(options={"idempotency_key": "order:{order}"}),
    "a label": Case(options={"idempotency_label": "order {order}"}, straight=False),
    "no result": Case(options={"ignore_result": True}),
    "no result of the call": Case(publish={"ignore_result": True}, straight=False),
    "results apart": Case(options={"idempotency_fused_completion": False}),
    "not stored": Case(options={"idempotency_store_result": False}, straight=False),
    "pickled": Case(options={"idempotency_serializer": "pickle"}, straight=False),
    "until finished": Case(options={"idempotency_until": "finished"}, straight=False),
    "in shadow": Case(options={"idempotency_shadow": True}, straight=False),
    "switched off": Case(options={"idempotency_enabled": False}, straight=False),
    "a key of the call": Case(publish={"idempotency_key": "mine"}, straight=False),
    "unprotected": Case(publish={"idempotency_key": False}, straight=False),
    "a time of the call": Case(publish={"idempotency_result_ttl": 7}, straight=False),
    "a foreign header": Case(publish={"headers": {"tenant": "t1"}}),
    "a misspelt header": Case(
        publish={"headers": {"idempotency-key": "x"}, "by_name": True}, straight=False
    ),
    "a misplaced option": Case(publish={"idempotency_key": "x", "by_name": True}, straight=False),
    "sent by name": Case(publish={"by_name": True}),
    "a group": Case(publish={"group_id": "g", "parent_id": "p", "root_id": "r"}),
    "expires": Case(publish={"expires": 3600}),
    "a priority": Case(publish={"priority": 3}),
    "an id of its own": Case(publish={"task_id": "mine"}),
    "wrong arguments": Case(publish={"kwargs": {"wrong": 1}, "by_name": True}, straight=False),
    "replay of nothing": replayed(None),
    "replay of text": replayed("receipt"),
    "replay of a dict": replayed({"a": [1]}),
    "replay of a date": replayed(datetime(2026, 1, 2, tzinfo=timezone.utc)),
    "replay without a value": replayed(object(), straight=False),
    "replay without fusion": replayed(
        1, options={"idempotency_fused_completion": False}, straight=False
    ),
    "a copy after the end": replayed(1, publish={"task_id": OTHER_ID}, straight=False),
    "a conflict": Case(before=held, straight=False),
    "a damaged record": Case(before=overwritten, straight=False),
    "reused": Case(
        options={"idempotency_key": "order:{order}"},
        before=used_with_other_arguments,
        straight=False,
    ),
}


class Seen:
    """What a delivery has left, without what differs each time."""

    def __init__(self, server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
        self._client, self._caplog = server.client(), caplog
        self.counts: list[tuple[str, ...]] = []
        self.signals: list[tuple[str, set[str]]] = []

    def count(self, *row: str) -> None:
        self.counts.append(row)

    def receive(self, signal: Any, **fields: Any) -> None:
        self.signals.append((signal.name, fields.keys()))

    def everything(self, app: Celery, end: Any) -> dict[str, Any]:
        names = sorted(name for name in self._client.scan_iter() if not name.startswith(b"_"))
        return {
            "end": (end.state, re.sub("0x[0-9a-f]+", "", repr(end.error))),
            # An entry ends with the root of its message.
            "values": [(name.partition(b"}")[0], self._value(name)) for name in names],
            "expire": [round(self._client.pttl(name), -5) for name in names],
            "counts": list(self.counts),
            "signals": self.signals,
            "lines": [
                re.sub(r"0x[0-9a-f]+|\b\d+\.\d s", "", each.getMessage())
                for each in self._caplog.records
                if each.name.startswith("celery_idempotent")
            ],
        }

    def _value(self, name: bytes) -> Any:
        if self._client.type(name) != b"string":
            return self._client.type(name)
        raw = self._client.get(name)
        if raw.startswith(b'{"status"'):
            return {**json.loads(raw), "date_done": "", "traceback": ""}
        if b":@" in name:
            return raw[:2] + raw[9:]
        if raw == b"damaged" or b":message:" in name:
            return raw[:7]
        letter, attempt, _, _, *fields = layout._unpack(raw)
        fields[3] = len(fields[3])  # the owner, which has the root and the execution id
        if letter in b"RS":
            fields[4] = b""  # until when the outcome is kept
        return letter, attempt, fields


#: Those that end on the line in different ways, and some that leave it at each of its steps.
IN_SHORT = (
    *("nothing", "a number", "text", "a dict", "a rule", "no result", "sent by name"),
    *("replay of text", "replay of a date", "a date", "no JSON", "an error", "ignored", "a retry"),
    *("a step", "a label", "until finished", "a misspelt header", "a conflict", "a damaged record"),
)


@pytest.mark.parametrize("case", exhaustive_except(CASES, *IN_SHORT))
def test_a_message_leaves_the_same(
    case: str,
    server: RedisServer,
    broker_app: Celery,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    broker_app.conf.accept_content = ["json", "pickle"]
    body, options, publish, before, is_straight = CASES[case]

    def pay(self: IdempotentTask, order: str, amount: int = 1) -> Any:
        return None if order == "another" else body(self, order)

    ended: list[bool] = []
    seen = {}
    go_on, execute = straight.StraightCall._go_on, straight.StraightCall.execute

    def executed(call: straight.StraightCall) -> Any:
        ended.append(True)
        return execute(call)

    def left(call: straight.StraightCall) -> Any:
        ended[-1] = False
        return go_on(call)

    monkeypatch.setattr(straight.StraightCall, "execute", executed)
    monkeypatch.setattr(straight.StraightCall, "_go_on", left)
    for on_line in (True, False):
        if not on_line:
            monkeypatch.setattr(straight, "line_of", lambda *_: None)
        server.client().flushall()
        how: Any = {"base": IdempotentTask, "name": "shop.pay", "shared": False, "lazy": False}
        task: IdempotentTask = broker_app.task(pay, bind=True, **how, **options)
        deliveries = Deliveries(broker_app, task)
        # The server has the scripts after that.
        deliveries.deliver(deliveries.publish("another", task_id=OTHER_ID))
        before(deliveries)
        send = dict(publish)
        if send.pop("by_name", False):
            broker_app.send_task(task.name, ["1"], **{"task_id": TASK_ID, **send})
            message = deliveries.next()
        else:
            message = deliveries.publish("1", **{"task_id": TASK_ID, **send})
        assert message is not None
        caplog.clear()
        this = seen[on_line] = Seen(server, caplog)
        monkeypatch.setattr(report, "counters", [this.count])
        ended.clear()
        for each in vars(signals).values():
            if hasattr(each, "providing_args"):
                each.connect(this.receive)
        try:
            end: Any = deliveries.deliver(message)
        except SystemExit as exit_:
            end = End("exit", exit_)
        finally:
            for each in vars(signals).values():
                if hasattr(each, "providing_args"):
                    each.disconnect(this.receive)
        seen[on_line] = this.everything(broker_app, end)
        if on_line:
            assert (ended == [True]) is is_straight
        while deliveries.next() is not None:
            pass
        broker_app.tasks.pop("shop.pay")

    assert seen[True] == seen[False]


#: Values as JSON has them. Redis gets the same text for any other.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts),
    max_leaves=5,
)


def give(order: Any, value: Any) -> Any:
    return value


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "rule",
    exhaustive_except([None, "order:{order}", BY_TASK_ID], "order:{order}"),
    ids=["all", "template", "id"],
)
def test_commands_are_those_of_the_flow(
    rule: Any, broker_app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte."""
    task: IdempotentTask = broker_app.task(
        give, base=IdempotentTask, shared=False, name="50%:é", lazy=False, idempotency_key=rule
    )
    deliveries, store = Deliveries(broker_app, task), task.idempotency_configuration.executor.store
    sent: list[bytes] = []
    calls: list[straight.StraightCall] = []
    requests: list[Any] = []
    send_packed, execute = store.send_packed, straight.StraightCall.execute

    def send(packed: bytes, count: int = 1) -> list[Any]:
        sent.append(packed)
        return send_packed(packed, count)

    def run(call: straight.StraightCall) -> Any:
        calls.append(call)
        requests.append(call._request)  # a call refers to it weakly
        return execute(call)

    def packed(command: commands.Command) -> bytes:
        return pack(store._call(command))

    monkeypatch.setattr(store, "send_packed", send)
    monkeypatch.setattr(straight.StraightCall, "execute", run)
    deliveries.deliver(deliveries.publish(0, 0))  # loads the scripts

    @settings(max_examples=50, deadline=None, suppress_health_check=[*HealthCheck])
    @given(st.integers(), JSON, st.uuids().map(str) | st.text("a%:\u00e9", min_size=1))
    def check(order: int, value: Any, task_id: str) -> None:
        task.idempotency_configuration.executor.store.client.flushdb()
        sent.clear()
        message = deliveries.publish(order, value, task_id=task_id, parent_id=task_id)
        assert deliveries.deliver(message).state == "success"
        call = calls[-1]
        flow = call.in_flow
        result = flow._backend_result(value)
        assert result is not None
        body = json.dumps(value).encode()
        complete = commands.complete(
            call.key, call.token, Payload("json", body), flow.data.settings.result_ms, result
        )
        assert sent == [packed(begin_command(flow.active)), packed(complete)]

    with freeze_time("2026-11-23 12:00:00.5"):
        check()


@pytest.fixture
def terminated() -> Iterator[None]:
    def leave(*_: Any) -> None:
        raise SystemExit(-241)  # as billiard does at SIGTERM

    before = signal.signal(signal.SIGTERM, leave)
    yield
    signal.signal(signal.SIGTERM, before)
    call.running.clear()  # the process would have ended


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.xdist_group
# A coroutine that the signal has kept from starting; the process ends.
@pytest.mark.filterwarnings("ignore:coroutine.*was never awaited")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("duplicate", [False, True], ids=["run", "replay"])
def test_an_exit_at_every_line(
    broker_app: Celery, server: RedisServer, terminated: None, duplicate: bool
) -> None:
    """The process ends, and the message runs once more at most, when it is redelivered."""
    runs: list[str] = []

    def pay(order: str) -> str:
        runs.append(order)
        return "receipt"

    task: IdempotentTask = broker_app.task(
        pay, base=IdempotentTask, shared=False, name="shop.leaving", lazy=False
    )
    deliveries = Deliveries(broker_app, task)
    ends: Counter[str] = Counter()
    for at in count(1):
        server.client().flushdb()
        deliveries.deliver(deliveries.publish("another"))
        if duplicate:
            deliveries.deliver(deliveries.publish("1"))
        runs.clear()
        message = deliveries.publish("1")
        injected = SignalAtLine(at, signal.SIGTERM)
        try:
            with injected.armed():
                # An exit leaves context variables set, as the process would have ended.
                end = copy_context().run(deliveries.deliver, message).state
        except SystemExit:
            end = "exit"
        if not injected.where:
            break
        ends[end] += 1
        record = task.idempotency_record("1")
        about = f"{at}, {injected.where}: {end}, {record}, {runs}"
        assert heartbeat.held() == (), about
        assert record is None or record.state is State.COMPLETED, about
        assert len(runs) <= (not duplicate), about
        if record is None:
            assert end == "exit", about
        assert deliveries.deliver(message).state == "success", about
        assert task.AsyncResult(message.id).get(timeout=1) == "receipt", about
        if record is not None and not duplicate:
            assert runs == ["1"], about
    assert ends["exit"] > 100


def test_a_json_encoder_of_the_project_writes_values(broker_app: Celery, task: Make) -> None:
    def pay(self: Any, order: str) -> Any:
        return SplitResult("a", "b", "", "", "")

    def encode(value: Any) -> str:
        return kombu_json.dumps(value.geturl() if isinstance(value, SplitResult) else value)

    types = {"content_type": "application/json", "content_encoding": "utf-8"}
    register("json", encode, kombu_json.loads, **types)
    try:
        paid = task(pay)
        deliveries = Deliveries(broker_app, paid)
        assert deliveries.deliver(deliveries.publish("1")).state == "success"
    finally:
        register("json", kombu_json.dumps, kombu_json.loads, **types)
    assert paid.idempotency_record("1").result == "a://b"


def test_an_ended_call_leaves_no_reference_cycle(broker_app: Celery, task: Make) -> None:
    """Only the garbage collector would free its memory, and processes would grow until then."""

    def body(self: IdempotentTask, order: str) -> str:
        return order

    deliveries = Deliveries(broker_app, task(body))
    warm, *messages = [deliveries.publish(order) for order in ("warm", "order", "order")]
    assert deliveries.deliver(warm).state == "success"
    gc.collect()
    gc.disable()
    try:
        for message in messages:
            assert deliveries.deliver(message).state == "success"
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = {type(each).__name__ for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left.isdisjoint({"Context", "StraightCall", "Lease"})
