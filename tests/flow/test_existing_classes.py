"""A project's own base classes: tests replace their methods, and `enabled=False` leaves them be."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
from celery import Celery, Task
from celery.exceptions import Ignore

from celery_idempotent import IdempotentTask, State
from celery_idempotent.core.task.message.message_headers import MessageHeaders, Waits
from celery_idempotent.core.task.publish.message_copy import with_derived_key
from tests.flow.deliveries import Deliveries

HANDLERS = ("before_start", "on_success", "on_failure", "after_return")

Make = Callable[..., Any]


def noting(name: str) -> Callable[..., None]:
    """Returns a handler that notes its call."""

    def handler(self: Any, *_: Any) -> None:
        self.notes.append(name)

    return handler


class Handling:
    """Notes the calls of handlers and of ``__call__``."""

    notes: list[str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.notes.append("__call__")
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    before_start, on_success, on_failure, after_return = map(noting, HANDLERS)


class ShopTask(Handling, IdempotentTask):
    """The base class of a project."""

    abstract = True


class PlainShopTask(Handling, Task):
    """The same before the library was adopted."""

    abstract = True


@pytest.fixture
def make(app: Celery) -> Make:
    app.conf.task_eager_propagates = False

    def make(base: Any = ShopTask, **options: Any) -> Any:
        def charge(order: str) -> str:
            if order == "fails":
                raise ValueError(order)
            return order

        name = f"shop.{base.__name__}"
        return app.task(charge, base=base, name=name, shared=False, lazy=False, notes=[], **options)

    return make


class TestReplacedMethods:
    @pytest.mark.parametrize(
        ("name", "of_the_task"), [*((name, False) for name in HANDLERS), ("on_success", True)]
    )
    def test_a_handler_is_called_once(self, make: Make, name: str, of_the_task: bool) -> None:
        task = make()
        order = "fails" if name == "on_failure" else "order"
        with patch.object(type(task) if of_the_task else ShopTask, name) as handler:
            task.delay(order)
            if not of_the_task and order != "fails":
                task.delay(order)  # a duplicate

        assert handler.call_count == 1
        assert name not in task.notes
        task.delay("fails")
        assert ("on_failure" if name == "on_success" else name) in task.notes

    def test_the_call_of_the_base_class(self, make: Make) -> None:
        task = make()
        with patch.object(ShopTask, "__call__", lambda self, order: f"replaced {order}"):
            assert task.delay("order").get() == "replaced order"

        assert task.delay("order").get() == "replaced order"
        assert task.delay("another").get() == "another"
        assert task.notes.count("__call__") == 1


class TestWithoutIdempotency:
    @pytest.fixture
    def disabled(self, app: Celery, make: Make) -> Any:
        app.conf.idempotency_enabled = False
        return make()

    @pytest.mark.parametrize("order", ["order", "fails"])
    def test_calls_are_those_of_a_plain_task(self, disabled: Any, make: Make, order: str) -> None:
        plain = make(PlainShopTask)
        for task in (plain, disabled):
            task.delay(order)
            task.delay(order)

        assert disabled.notes == plain.notes

    def test_methods_are_those_of_the_class(self, app: Celery, disabled: Any, make: Make) -> None:
        plain = make(PlainShopTask)
        for name in (*HANDLERS, "__call__"):
            method = getattr(disabled, name)
            assert isinstance(method, MethodType)
            assert method.__func__ is vars(Handling)[name]
        for name in ("acks_late", "reject_on_worker_lost", "Request"):
            assert getattr(disabled, name) == getattr(plain, name)
        app.conf.task_acks_late = True
        assert disabled.acks_late is True

    @pytest.mark.parametrize("later", [True, False], ids=["enabled", "disabled"])
    def test_a_later_change_calls_each_once(self, app: Celery, make: Make, later: bool) -> None:
        app.conf.idempotency_enabled = not later
        task = make()
        task.delay("order")
        app.conf.idempotency_enabled = later
        type(task)._configurations = {}
        task.notes.clear()
        task.delay("order")
        if later:
            task.delay("order")  # a duplicate

        assert task.notes == ["before_start", "__call__", "on_success", "after_return"]
        assert task.acks_late is later


class Sync(IdempotentTask):
    name = "shop.sync"

    def __init__(self, name: str | None, **options: Any) -> None:
        vars(self).update(options, name=name)

    def run(self, *order: str) -> list[Any]:
        return [self.name, *order]


def test_each_instance_of_a_class_has_its_own_name_and_options(app: Celery) -> None:
    acme = app.register_task(Sync("acme"))
    blue = app.register_task(Sync("blue", idempotency_until="finished"))
    automatic = app.register_task(type("Automatic", (Sync,), {"name": None})(None))

    for task in (acme, blue, automatic, acme, blue):
        assert task.apply(("1",)).get() == [task.name, "1"]
    assert acme.idempotency_record("1").task == "acme"
    assert automatic.idempotency_record("1").task == automatic.name


class Tracing(Task):
    """A base class that replaces the headers of every message, and forwards the running call's."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        headers = {**(self.request.headers or options["headers"]), "trace_id": "1"}
        return super().apply_async(args, kwargs, **{**options, "headers": headers})


def test_an_order_of_bases_that_hides_methods_is_refused() -> None:
    with pytest.raises(TypeError, match=r"hides __call__ of Handling in Own: write class Own\(H"):
        type("Own", (IdempotentTask, PlainShopTask), {})
    type("Own", (IdempotentTask, PlainShopTask), {"__call__": IdempotentTask.__call__})


@pytest.mark.parametrize("retries", [True, False], ids=["retry", "publish under its own id"])
def test_a_message_with_the_headers_of_the_one_before_keeps_its_key(
    broker_app: Celery, order: str, retries: bool
) -> None:
    """It does not wait for what the message before has waited for."""

    def charge(self: Any, order: str) -> int:
        if order != "changed":
            if retries:
                raise self.retry(args=("changed",), countdown=0.01)
            options = {"task_id": self.request.id, "headers": self.request.headers}
            self.apply_async(("changed",), **options)
            raise Ignore
        return int(self.idempotency.attempt)

    base = type("Traced", (Tracing, IdempotentTask), {"abstract": True})
    task = broker_app.task(charge, base=base, bind=True, name="shop.traced", shared=False)
    deliveries = Deliveries(broker_app, task)

    own, waits = {"idempotency_key": order}, Waits(1, 2, "holder")
    key = task.idempotency_key_of(**own)
    headers = with_derived_key(own, key, order, put_back_count=1, waits=waits)
    deliveries.delivered(order, task_id=order, headers=headers)
    again: Any = deliveries.next()
    carried = MessageHeaders.read(task.name, order, again.request_dict)
    assert carried == MessageHeaders(order, key=key)

    assert deliveries.deliver(again).state == "success"
    assert task.idempotency_record(idempotency_key=order).state is State.COMPLETED
