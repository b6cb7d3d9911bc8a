"""Arguments of an odd type that Celery accepts, and what it does with them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest
from celery import Task
from celery.result import EagerResult

from tests.flow.deliveries import Deliveries, Offer
from tests.waiting import SOON

#: Of `apply`, `apply_async` and signatures.
ODD: dict[str, list[Any]] = {
    "headers": [123, 0, "", "x", [], [("a", 1)], (), {1: 2}, True, MappingProxyType({"a": 1})],
    "task_id": [UUID(int=5), b"bytes", 5, 0, "", 1.5, True, ["a"], {"a": 1}, "x" * 300],
    "args": [None, [], 0, "", "a", {"n": 1}, {1}, (n for n in [1]), range(1), b"a", 5, (1, 2, 3)],
    "kwargs": [None, 0, "", [], [("n", 1)], 5, "x", {1: 2}, {"none": 1}],
    "link": [None, [], (), "x", 5, {}],
    "link_error": [None, [], (), "x", 5],
    "countdown": [None, 0, 1.5, "1", "x", True, timedelta(seconds=1), -1, Decimal(1)],
    "expires": [None, 0, 1.5, -1, "5", "x", True, timedelta(seconds=5), []],
    "retries": [None, "1", 1.5, -1],
    "ignore_result": [None, 0, "x"],
    "stamped_headers": [None, [], "x"],
    "replaced_task_nesting": [None, "1"],
    "properties": [None, {}, {"a": 1}],
    "root_id": [None, 5, UUID(int=5)],
    "parent_id": [None, 5, UUID(int=5)],
}
CALLS: dict[str, Callable[[Any, str, Any], Any]] = {
    "apply": lambda task, name, value: task.apply(**{name: value}),
    "apply_async": lambda task, name, value: task.apply_async(**{name: value}),
    "set": lambda task, name, value: (
        task.signature(**{name: value}).apply_async()
        if name in ("args", "kwargs")
        else task.s(1).set(**{name: value}).apply_async()
    ),
}


@pytest.mark.parametrize("way", CALLS)
@pytest.mark.parametrize("name", ODD)
def test_it_ends_as_in_celery(offer: Offer, name: str, way: str) -> None:
    def body(self: Any, n: int = 0, m: int = 0) -> Any:
        return str(n)

    def end(deliveries: Deliveries, value: Any) -> Any:
        value = (n for n in [1]) if hasattr(value, "__next__") else value
        deliveries.purge()
        try:
            result = CALLS[way](deliveries.task, name, value)
            if isinstance(result, EagerResult):
                return result.state, type(result.result)
            message = deliveries.received()
            return deliveries.deliver(message).state, result.id == message.id
        except Exception as error:
            return type(error).__name__

    ours, celerys = offer(body), offer(body, base=Task)
    ends = [(value, end(ours, value)) for value in ODD[name]]

    assert ends == [(value, end(celerys, value)) for value in ODD[name]]


#: Of `retry`. In a worker, Celery drops a message with an option of a wrong type.
RETRIES: dict[str, list[Any]] = {
    "args": [None, (), [], ("a",), "a", (n for n in ["a"]), 5],
    "kwargs": [None, {}, {"n": "b"}, (), 5],
    "exc": [None, LookupError(), "text"],
    "throw": [None, True, False, 0],
    "countdown": [0, None, 1.5, "1", "x", timedelta(seconds=1), -1],
    "eta": [None, 5],
    "max_retries": [None, 0, 5, "5"],
    "headers": [None, {}, {"a": 1}],
    "link": [None, [], ()],
    "ignore_result": [None, True],
    "expires": [None, 5, "5", timedelta(seconds=5)],
}


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "worker"])
@pytest.mark.parametrize("name", RETRIES)
def test_a_retry_with_it_ends_as_in_celery(offer: Offer, name: str, is_eager: bool) -> None:
    def body(self: Any, n: str = "", m: int = 0) -> Any:
        runs.append(n)
        if len(runs) > 3:
            return len(runs)
        value = values[0]
        value = (n for n in ["a"]) if hasattr(value, "__next__") else value
        options = {"countdown": 0, "exc": LookupError(), "max_retries": 1, name: value}
        return self.retry(**options)

    def end(deliveries: Deliveries, value: Any) -> Any:
        runs.clear()
        values[:] = [value]
        deliveries.purge()
        order = f"first {RETRIES[name].index(value)}"
        if is_eager:
            result = deliveries.task.apply((order,))
            return len(runs), result.state, type(result.result)
        message = first = deliveries.publish(order)
        states = []
        while message is not None and len(states) < 5:
            state = deliveries.deliver(message).state
            states.append(("failure" if state == "dropped" else state, message.id == first.id))
            message = deliveries.next()
        state = deliveries.app.AsyncResult(first.id).state
        return len(runs), states, "FAILURE" if state == "PENDING" else state

    runs: list[Any] = []
    values: list[Any] = []
    ours, celerys = offer(body), offer(body, base=Task)
    ends = [(value, end(ours, value)) for value in RETRIES[name]]

    assert ends == [(value, end(celerys, value)) for value in RETRIES[name]]


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "worker"])
def test_a_retry_keeps_its_task_id(offer: Offer, is_eager: bool) -> None:
    def body(self: Any, order: str) -> Any:
        self.retry(task_id="another")

    deliveries = offer(body)
    result = deliveries.task.apply(("1",))
    if not is_eager:
        message = deliveries.delivered("1")
        result = deliveries.app.AsyncResult(message.id)

    with pytest.raises(TypeError, match=r"^retry\(\) takes no task_id: "):
        result.get(timeout=SOON)


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_an_eager_task_that_returns_its_retry(offer: Offer, serializer: str) -> None:
    def body(self: Any, order: str) -> Any:
        runs.append(order)
        return 42 if len(runs) == 3 else self.retry(exc=LookupError(), throw=False)

    runs: list[str] = []
    deliveries = offer(body, options={"idempotency_serializer": serializer})

    assert deliveries.task.apply(("1",)).get() == deliveries.task.apply(("1",)).get() == 42
    assert len(runs) == 3
