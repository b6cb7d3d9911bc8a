"""A task that replaces itself by a canvas with itself runs once, otherwise as in plain Celery."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Task, chain, chord, group, shared_task
from celery.canvas import Signature
from celery.result import AsyncResult

from celery_idempotent import TASK_ID, State
from celery_idempotent.contrib.sqlalchemy import metadata
from tests.conftest import exhaustive_except
from tests.waiting import SOON, eventually
from tests.worker.canvas_tasks import report
from tests.worker.harness import OpenShop, Shop
from tests.worker.ledger import Ledger, recorded_run
from tests.worker.tasks import OutOfStockError, task_of

engine = sa.create_engine(f"sqlite:///{os.environ.get('SHOP_DATABASE', '')}")
with engine.begin() as connection:
    connection.exec_driver_sql("PRAGMA journal_mode=WAL")
metadata.create_all(engine)


@shared_task(bind=True, name="shop.between")
def between(self: Any, received: Any = None, order: str = "", part: str = "between") -> list[Any]:
    """A plain Celery task between the others."""
    Ledger.of(self.app).note(order, part)
    Ledger.of(self.app).wait_for_release(f"{part} of {order}")
    return [part, received]


@shared_task(bind=True, name="shop.pass_on")
def pass_on(self: Any, task: Any, _: Any) -> None:
    """A plain Celery task that replaces itself by another task."""
    self.replace(self.app.signature(task).clone(kwargs={"depth": 1}).set(immutable=True))


#: Makes a member of the canvas, or one of the plain tasks between.
Make = Callable[..., Signature]


def _nested(me: Make, other: Signature) -> Signature:
    branches = group(chain(me("one"), other), chain(other, me("two")), me("three"))
    return chain(other, branches, me("end"))


#: Canvases of a task `me`, which has its own key, and a plain task.
SHAPES: dict[str, Callable[[Make, Signature], Signature]] = {
    "itself": lambda me, other: me("end").set(immutable=True),
    "the end of a chain": lambda me, other: chain(other, me("end")),
    "the start of a chain": lambda me, other: chain(me("start"), other),
    "the middle of a chain": lambda me, other: chain(other, me("middle"), other),
    "twice in a chain": lambda me, other: chain(me("one"), me("two")),
    "in a group": lambda me, other: group(me("one"), other, me("two")),
    "the header of a chord": lambda me, other: chord([me("one"), me("two")], other),
    "the body of a chord": lambda me, other: chord([other, other], me("end")),
    "nested": _nested,
    "again": lambda me, other: chain(other, me("end", shape="the end of a chain")),
    "again in the middle": lambda me, other: chain(me("one", shape="the end of a chain"), other),
    "by way of a plain task": lambda me, other: pass_on.si(me("end"), other),
}


def weave(
    self: Any, got: Any = None, order: str = "", shape: str = "", part: str = "", depth: int = 0
) -> list[Any]:
    """Replaces itself by the canvas of that `shape`; without one, it is a member of the canvas."""
    with recorded_run(self, order) as ledger:
        ledger.wait_for_release(f"{part} of {order}")
        ledger.die_if_requested(part, order)
        if shape and not depth:
            self.replace(SHAPES[shape](partial(_member, self, order), between.s(order=order)))
    ledger.note(order, part)
    return [part, got]


def _member(task: Any, order: str, part: str, **kwargs: Any) -> Signature:
    return task.s(order=order, part=part, **kwargs)


KEYED: dict[str, Any] = {"idempotency_key": "{order}"}
plain_weave = shared_task(weave, bind=True, base=Task, name="shop.plain_weave")
woven = task_of(weave, "woven", **KEYED)
woven_by_id = task_of(weave, "woven_by_id", idempotency_key=TASK_ID)
# Shadow excludes a transaction, also in an app in shadow.
IN_SQL = {"idempotency_transaction": f"{__name__}:engine", "idempotency_shadow": False}
woven_in_sql = task_of(weave, "woven_in_sql", **IN_SQL, **KEYED)


def stages(self: Any, got: Any = None, order: str = "", stage: int = 0) -> int:
    """Replaces itself by a chain with its next stage; each stage has the same step."""
    with recorded_run(self, order) as ledger:
        self.idempotency.step("once", ledger.note, order, "once")
        if stage < 2:
            self.replace(chain(between.si(order=order), in_stages.s(order=order, stage=stage + 1)))
        return stage


in_stages = task_of(stages, "in_stages", ignore_result=True, **KEYED)


@shared_task(bind=True, name="shop.stumble")
def stumble(self: Any, received: Any = None, order: str = "", shape: str = "") -> str:
    """A plain Celery task that fails once for each order; notes that it runs."""
    ledger = Ledger.of(self.app)
    ledger.wait_for_release(f"stumble of {order}")
    ledger.note(order, "stumble")
    if len(ledger.notes(order)) == 1:
        ends_key = shape == "an error that ends the key"
        raise LookupError(order) if ends_key else OutOfStockError(order, 1)
    return "done"


#: Canvases of a task that fails, and plain tasks of other orders.
FAILING: dict[str, Callable[[Signature, Make], Signature]] = {
    "a task": lambda failing, other: failing,
    "the start of a chain": lambda failing, other: chain(failing, other("end")),
    "the end of a chain": lambda failing, other: chain(other("start"), failing),
    "in a group": lambda failing, other: group(failing, other("other")),
    "the header of a chord": lambda failing, other: chord([failing, other("other")], other("body")),
    "the body of a chord": lambda failing, other: chord([other("one"), other("two")], failing),
    "an expired task": lambda failing, other: failing.set(expires=-1),
    "an error that ends the key": lambda failing, other: failing,
}


def hand_on(self: Any, order: str, shape: str = "a task", amount: int = 1) -> None:
    """Replaces itself by a canvas that fails once."""
    with recorded_run(self, order) as ledger:
        if shape == "an expired task" and not ledger.notes(order):
            ledger.note(order, "expires")
        elif shape == "an expired task":
            shape = "a task"
        self.replace(FAILING[shape](stumble.si(order=order, shape=shape), partial(_another, order)))


def _another(order: str, name: str) -> Signature:
    return between.si(order=f"{name} of {order}")


handing_on = task_of(hand_on, "handing_on", idempotency_replay_errors=(LookupError,), **KEYED)
handing_on_once = task_of(hand_on, "handing_on_once", idempotency_dedupe_publish=True, **KEYED)
handing_on_in_turn = task_of(hand_on, "handing_on_in_turn", idempotency_until="finished", **KEYED)


@pytest.fixture(scope="module")
def shared_shop(open_shop: OpenShop, tmp_path_factory: Any) -> Iterator[Shop]:
    database = tmp_path_factory.mktemp("database") / "shop.db"
    with open_shop(imports=[__name__]) as shop:
        shop.start_worker(concurrency=4, SHOP_DATABASE=str(database))
        yield shop


def in_plain_celery(ledger: Ledger, order: str, shape: str) -> tuple[Any, list[str]]:
    """Returns the result and the executed members with plain Celery."""
    order = f"plain {order}"
    result = plain_weave.delay(order=order, shape=shape).get(timeout=SOON)
    return result, sorted(ledger.notes(order))


#: Where another rule or a transaction decides something.
CORNERS = ("itself", "the end of a chain", "in a group")


@pytest.mark.core
@pytest.mark.parametrize(
    ("task", "shape", "in_a_chain"),
    [
        *((woven, shape, False) for shape in SHAPES),
        *((woven_in_sql, shape, False) for shape in CORNERS),
        *((woven, shape, True) for shape in CORNERS),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                *((woven_by_id, shape, False) for shape in CORNERS),
                *((woven, shape, True) for shape in SHAPES if shape not in CORNERS),
            )
        ),
    ],
)
def test_result_and_executions_are_those_of_plain_celery_despite_a_copy(
    shop: Shop, ledger: Ledger, order: str, task: Any, shape: str, in_a_chain: bool
) -> None:
    """In a chain, what follows the task follows its replacement."""
    expected, members = in_plain_celery(ledger, order, shape)
    call = task.s(order=order, shape=shape).set(task_id=order, queue="kept")
    last = report.s(f"after {order}")
    result = chain(call, last).apply_async() if in_a_chain else call.apply_async()
    message = shop.deliver_kept(order)
    ledger.wait_for_run(order)
    shop.redis.lpush("celery", message)

    assert result.get(timeout=SOON) == expected
    ledger.wait_for_signal(order, "completed")  # the replacement may be faster
    shop.wait_until_empty()
    shop.replay(message, order)
    assert sorted(ledger.notes(order)) == members
    assert len(ledger.notes(f"after {order}")) == in_a_chain


@pytest.mark.core
@pytest.mark.parametrize("shape", exhaustive_except(SHAPES, *CORNERS))
def test_duplicates_get_the_final_result(ledger: Ledger, order: str, shape: str) -> None:
    expected, members = in_plain_celery(ledger, order, shape)
    ledger.hold(f"{members[0]} of {order}")
    call = woven.s(order=order, shape=shape)
    first = call.delay()
    ledger.wait_for_run(order)
    during = call.delay()
    ledger.wait_for_signal(during.id, "conflicted")
    ledger.release(f"{members[0]} of {order}")

    assert [result.get(timeout=SOON) for result in (first, during)] == [expected] * 2
    assert call.delay().get(timeout=SOON) == expected
    assert sorted(ledger.notes(order)) == members


@pytest.mark.parametrize(
    "shape", exhaustive_except(["in a group", "the body of a chord"], "in a group")
)
def test_in_the_header_of_a_chord(ledger: Ledger, order: str, shape: str) -> None:
    expected, members = in_plain_celery(ledger, order, shape)
    call = woven.s(order=order, shape=shape)

    whole = chord([call, call])(report.s(f"after {order}")).get(timeout=SOON)

    # Older versions of Celery return the members of a group within a chord in any order.
    assert [sorted(result, key=str) for result in whole] == [sorted(expected, key=str)] * 2
    assert sorted(ledger.notes(order)) == members
    assert len(ledger.notes(f"after {order}")) == 1


def test_stages_with_one_key_keep_the_outcome_without_a_backend(ledger: Ledger, order: str) -> None:
    in_stages.delay(order=order)
    eventually(lambda: len(runs := ledger.runs(order)) == 3 and runs[2].end, "the last one has run")

    runs = ledger.runs(order)
    assert len({run.key for run in runs}) == len({run.task_id for run in runs}) == 1
    assert [run.attempt for run in runs] == [1, 1, 1]
    assert sorted(run.token for run in runs) == [run.token for run in runs]
    eventually(lambda: in_stages.idempotency_record(order=order).result == 2, "it is stored")


@pytest.mark.exhaustive
def test_replacement_with_the_same_key_is_taken_over_if_killed(ledger: Ledger, order: str) -> None:
    expected, members = in_plain_celery(ledger, order, "the end of a chain")
    ledger.kill_once("end", order)

    first = woven.delay(order=order, shape="the end of a chain")

    assert first.get(timeout=SOON) == expected
    assert sorted(ledger.notes(order)) == members
    assert [run.end for run in ledger.runs(order)] == ["Ignore", None, "returned"]
    assert [run.attempt for run in ledger.runs(order)] == [1, 1, 2]


FAILURES = [shape for shape in FAILING if shape != "an error that ends the key"]


def error_of(result: AsyncResult) -> BaseException:
    error = result.get(timeout=SOON, propagate=False)
    assert isinstance(error, Exception)
    return error


# Its error frees the key, as an error of the replaced task does.
@pytest.mark.core
@pytest.mark.parametrize(
    ("task", "shape"),
    [
        *((handing_on, shape) for shape in FAILURES),
        *((task, "a task") for task in (handing_on_once, handing_on_in_turn)),
    ],
)
def test_the_next_runs_after_a_failure(ledger: Ledger, order: str, task: Any, shape: str) -> None:
    first = task.delay(order, shape)
    error_of(first)
    following = task.delay(order, shape, amount=2)

    assert following.id != first.id
    value = following.get(timeout=SOON)
    assert value == "done" if shape == "a task" else value
    assert len(ledger.runs(order)) == 2


def test_one_of_many_callers_runs_after_a_failed_replacement(ledger: Ledger, order: str) -> None:
    error_of(handing_on.delay(order))
    results = [handing_on.delay(order) for _ in range(8)]

    assert [result.get(timeout=SOON) for result in results] == ["done"] * 8
    assert len(ledger.runs(order)) == 2
    assert ledger.notes(order) == ["stumble"] * 2


def test_a_call_that_meets_a_replacement_that_fails(ledger: Ledger, order: str) -> None:
    ledger.hold(f"stumble of {order}")
    first = handing_on.delay(order)
    ledger.wait_for_run(order)
    during = ledger.duplicate(handing_on, order)
    ledger.release(f"stumble of {order}")

    error_of(first)
    assert during.get(timeout=SOON) == "done"
    assert len(ledger.runs(order)) == 2


def test_an_error_of_a_replacement_that_ends_the_key(ledger: Ledger, order: str) -> None:
    first, second = (handing_on.delay(order, "an error that ends the key") for _ in range(2))

    assert type(error_of(first)) is type(error_of(second)) is LookupError
    assert len(ledger.runs(order)) == 1


def test_an_earlier_end_of_the_task_id_is_not_taken_for_its_error(shop: Shop, order: str) -> None:
    shop.app.backend.mark_as_failure(order, OutOfStockError(order, 0))
    shop.ledger.hold(f"stumble of {order}")
    handing_on.apply_async((order,), task_id=order)
    shop.ledger.wait_for_signal(order, "completed")
    during = shop.ledger.duplicate(handing_on, order)

    assert len(shop.ledger.runs(order)) == 1
    shop.ledger.release(f"stumble of {order}")
    assert during.get(timeout=SOON) == "done"


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "by way of a plain task"])
def test_eager_result_is_that_of_plain_celery(ledger: Ledger, order: str, shape: str) -> None:
    plain = plain_weave.apply(kwargs={"order": f"plain {order}", "shape": shape})
    ours = woven.apply(kwargs={"order": order, "shape": shape})

    assert (ours.state, ours.result) == (plain.state, plain.result)
    assert sorted(ledger.notes(order)) == sorted(ledger.notes(f"plain {order}"))
    assert woven.idempotency_record(order=order).state is State.COMPLETED
