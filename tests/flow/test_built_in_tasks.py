"""Celery's own tasks in an app whose every task is idempotent (``task_cls``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app import builtins

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.operations.doctor import tasks as doctor
from tests.flow.deliveries import Deliveries
from tests.servers.redis_server import RedisServer


@pytest.fixture
def app(server: RedisServer) -> Iterator[Celery]:
    with server.client() as client:
        client.flushall()
    app = Celery("shop", set_as_current=False, task_cls="celery_idempotent:IdempotentTask")
    app.finalized = True  # without the shared tasks of other tests
    # A rule that fits no built-in task.
    app.conf.update(broker_url="memory://", result_backend=server.url, idempotency_key="{order}")
    for name in ("accumulate", "backend_cleanup", "map", "starmap"):
        getattr(builtins, f"add_{name}_task")(app)

    def handle(order: str) -> str:
        return order

    app.task(handle, name="celery.of_the_shop", shared=False, lazy=False)
    app.connection_for_read().default_channel.queue_purge("celery")
    yield app
    app.close()


def records(server: RedisServer) -> list[Any]:
    with server.client() as client:
        return client.keys("idem:*")


def test_are_not_idempotent(app: Celery, server: RedisServer) -> None:
    deliveries = Deliveries(app, app.tasks["celery.accumulate"])
    for _ in range(2):
        assert deliveries.deliver(deliveries.publish(1, 2)).state == "success"

    assert records(server) == []


def test_are_acknowledged_as_in_plain_celery(app: Celery) -> None:
    def options(name: str) -> tuple[bool, bool]:
        return app.tasks[name].acks_late, app.tasks[name].reject_on_worker_lost

    assert options("celery.backend_cleanup") == (False, None)
    assert options("celery.of_the_shop") == (True, True)


def test_are_not_listed_or_examined(app: Celery) -> None:
    assert [task.name for task in app_tasks.tasks(app)] == ["celery.of_the_shop"]
    assert {finding.subject for finding in doctor.check(app)} <= {"celery.of_the_shop"}


def test_items_of_a_map_run_unprotected_which_one_warning_says(
    app: Celery, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    task, celery_map = app.tasks["celery.of_the_shop"], app.tasks["celery.map"]
    deliveries = Deliveries(app, celery_map)
    for items in (task.map(["a", "a"]), task.starmap([("a",)]), task.chunks([("a",)], 1)):
        items.apply_async()
        message = deliveries.next()
        assert deliveries.deliver(message).state == "success"
    assert celery_map(task, ["a", "a"]) == celery_map(task=task.s(), it=["a", "a"]) == ["a", "a"]

    assert records(server) == []
    (warning,) = caplog.messages
    assert warning == (
        "celery.of_the_shop: the items of map, starmap and chunks run without protection; publish "
        "a group of its signatures to protect each call"
    )


def test_items_of_a_map_of_a_disabled_task(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    app.conf.idempotency_enabled = False

    assert app.tasks["celery.map"](app.tasks["celery.of_the_shop"], ["a"]) == ["a"]
    assert caplog.messages == []


def test_an_errback_of_a_map_is_no_item(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    def fail(order: str) -> None:
        raise LookupError(order)

    def note(request: Any, error: Exception, traceback: Any) -> None:
        noted.append(error)

    noted: list[Exception] = []
    errback = app.task(note, name="shop.note", lazy=False, shared=False, idempotency_key=("error",))
    failing = app.task(fail, name="shop.fail", lazy=False, shared=False)
    deliveries = Deliveries(app, app.tasks["celery.map"])
    failing.map(["a"]).apply_async(link_error=errback.s())
    deliveries.deliver(deliveries.received())

    assert [type(error) for error in noted] == [LookupError]
    (warning,) = (line for line in caplog.messages if "without protection" in line)
    assert warning.startswith("shop.fail: ")
