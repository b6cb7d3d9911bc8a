"""Handlers of a task run if and only if its body runs."""

from __future__ import annotations

import time
from typing import Any

import pytest
from celery import Task
from celery.worker.request import Request

from celery_idempotent import ConflictError, IdempotentTask, KeyReusedError
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import OutOfStockError, task_of


def _note(task: Any, name: str, task_id: str, args: Any, kwargs: Any) -> None:
    order = {**dict(zip(("order", "way"), args, strict=False)), **kwargs}["order"]
    Ledger.of(task.app).note(order, f"{name} of {task_id}")


def _noting(name: str) -> Any:
    """Returns a handler that notes its calls; those of Celery have these arguments in common."""

    def handler(self: Any, *details: Any) -> None:
        task_id, args, kwargs = details[-4:-1] if name != "on_success" else details[-3:]
        _note(self, name, task_id, args, kwargs)

    return handler


class Handlers:
    """Handlers that note their calls, for any task class."""

    on_success, on_failure = _noting("on_success"), _noting("on_failure")
    on_retry, after_return = _noting("on_retry"), _noting("after_return")

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Notes the call, and whether the execution is protected; may raise an error."""
        _note(self, "before_start", task_id, args, kwargs)
        if getattr(self, "idempotency", None) and not self.idempotency.protected:  # type: ignore[attr-defined]
            _note(self, "unprotected", task_id, args, kwargs)
        if "fails at the start" in args:
            raise OutOfStockError("at the start", 0)


class MixedTask(Handlers, IdempotentTask):
    """Inherits its handlers from a class that is not a Celery task."""

    abstract = True


def _work(self: Any, order: str, way: str = "") -> str:
    ledger, execution = Ledger.of(self.app), getattr(self, "idempotency", None)
    ledger.note(order, f"body of {self.request.id}")
    with ledger.run(order, self.request.id, execution):
        if way == "fails":
            raise OutOfStockError(order, 3)
        if way == "retries" and self.request.retries == 0:
            raise self.retry(countdown=1)
        return order


class NotingRequest(Request):
    """A message in the worker's main process, which notes how its pool process ends."""

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """Notes the call."""
        _note(self, "request failed", self.id, self.args, self.kwargs)
        return super().on_failure(exc_info, *args, **kwargs)


plain_base = type("PlainTask", (Handlers, Task), {"abstract": True})
in_plain_celery = task_of(_work, "in_plain_celery", base=plain_base)
with_mixin = task_of(_work, "with_mixin", base=MixedTask)
final = task_of(_work, "final_noting", base=MixedTask, idempotency_replay_errors=(OutOfStockError,))
refusing = task_of(_work, "refusing", base=MixedTask, idempotency_on_conflict="raise")
with_request = task_of(_work, "with_request", Request=NotingRequest)


SHOP = {"imports": [__name__]}


def handlers(ledger: Ledger, order: str, task_id: str) -> list[str]:
    """Returns the handlers and bodies that have run for a task id."""
    suffix = f" of {task_id}"
    return [note.removesuffix(suffix) for note in ledger.notes(order) if note.endswith(suffix)]


def settled(ledger: Ledger, order: str, task_id: str) -> list[str]:
    """Returns the same when the last handler has run."""
    eventually(lambda: "after_return" in handlers(ledger, order, task_id), "all handlers have run")
    return handlers(ledger, order, task_id)


@pytest.mark.core
@pytest.mark.parametrize(
    ("way", "eager"),
    [
        ("", True),
        *(
            pytest.param(way, False, marks=pytest.mark.exhaustive)
            for way in ("", "fails", "retries", "fails at the start")
        ),
    ],
)
def test_handlers_are_as_in_plain_celery(ledger: Ledger, order: str, way: str, eager: bool) -> None:
    calls = []
    for candidate in (in_plain_celery, with_mixin):
        task_id = f"{candidate.name} {order}"
        publish = candidate.apply if eager else candidate.apply_async
        publish((order, way), task_id=task_id)
        calls.append(settled(ledger, order, task_id))
    assert calls[1] == calls[0]
    assert f"unprotected of {with_mixin.name} {order}" not in ledger.notes(order)
    if eager:
        replay = with_mixin.apply((order, way))
        assert replay.result == order
        assert handlers(ledger, order, replay.id) == []


def meet_a_result(ledger: Ledger, order: str) -> Any:
    with_mixin.delay(order).get(timeout=SOON)
    return with_mixin.delay(order)


def meet_an_error(ledger: Ledger, order: str) -> Any:
    final.delay(order, "fails").get(timeout=SOON, propagate=False)
    return final.delay(order, "fails")


def meet_a_run(ledger: Ledger, order: str) -> Any:
    ledger.start(with_mixin, order)
    return ledger.duplicate(with_mixin, order)


def conflict(ledger: Ledger, order: str) -> Any:
    ledger.start(refusing, order)
    return ledger.duplicate(refusing, order)


def reuse(ledger: Ledger, order: str) -> Any:
    with_mixin.apply_async((order,), idempotency_key=order).get(timeout=SOON)
    return with_mixin.apply_async((order, "fails"), idempotency_key=order)


@pytest.mark.core
@pytest.mark.parametrize(
    ("meet", "error"),
    [
        (meet_a_result, None),
        (meet_an_error, OutOfStockError),
        (meet_a_run, None),
        (conflict, ConflictError),
        (reuse, KeyReusedError),
    ],
)
def test_no_handlers_for_a_duplicate(shop: Shop, order: str, meet: Any, error: Any) -> None:
    duplicate = meet(shop.ledger, order)
    shop.ledger.release(order)

    end = duplicate.get(timeout=SOON, propagate=False)
    assert end == order if error is None else isinstance(end, error)
    shop.wait_until_empty()
    assert handlers(shop.ledger, order, duplicate.id) == []


@pytest.mark.core
def test_no_handlers_for_a_copy_of_the_message(shop: Shop, ledger: Ledger, order: str) -> None:
    with_mixin.apply_async((order,), task_id=order)
    once = settled(ledger, order, order)
    with_mixin.apply_async((order,), task_id=order)
    ledger.wait_for_signal(order, "replayed")
    shop.wait_until_empty()

    assert handlers(ledger, order, order) == once


@pytest.mark.exhaustive
@pytest.mark.core
def test_own_request_keeps_what_happens_to_a_lost_process(ledger: Ledger, order: str) -> None:
    result = ledger.start(with_request, order)
    ledger.kill(order)
    killed_at = time.time()
    ledger.release(order)

    assert result.get(timeout=SOON) == order
    assert ledger.runs(order)[1].started_at - killed_at < 15, "the lease is 60 s"
    assert f"request failed of {result.id}" in ledger.notes(order)
