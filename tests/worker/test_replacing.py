"""A task that replaces itself by a canvas with itself runs once, otherwise as in plain Celery."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Task, chain, chord, group, shared_task
from celery.canvas import Signature
from celery.result import AsyncResult

from celery_idempotent import TASK_ID, IdempotentTask, State
from celery_idempotent.contrib.sqlalchemy import metadata
from tests.conftest import exhaustive_except
from tests.waiting import SOON, eventually
from tests.worker.canvas_tasks import report
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
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
def pass_on(self: Any, order: str, task: str, depth: int) -> None:
    """A plain Celery task that replaces itself by another task."""
    self.replace(self.app.tasks[task].si(order=order, part="end", depth=depth))


Make = Callable[..., Signature]


def _member(task: Any, order: str) -> Make:
    """Returns a function that creates members of a canvas: the task itself, with its key."""
    return lambda part, **kwargs: task.s(order=order, part=part, **kwargs)


def _twice_in_a_chain(task: Any, order: str) -> Signature:
    member = _member(task, order)
    return chain(member("one"), member("two"))


def _nested(task: Any, order: str) -> Signature:
    member, other = _member(task, order), between.s(order=order)
    branches = group(chain(member("one"), other), chain(other, member("two")), member("three"))
    return chain(other, branches, member("end"))


SHAPES: dict[str, Callable[[Any, str], Signature]] = {
    "itself": lambda task, order: task.si(order=order, part="end"),
    "the end of a chain": lambda task, order: chain(
        between.s(order=order), _member(task, order)("end")
    ),
    "the start of a chain": lambda task, order: chain(
        _member(task, order)("start"), between.s(order=order)
    ),
    "the middle of a chain": lambda task, order: chain(
        between.s(order=order), _member(task, order)("middle"), between.s(order=order)
    ),
    "twice in a chain": _twice_in_a_chain,
    "in a group": lambda task, order: group(
        _member(task, order)("one"), between.s(order=order), _member(task, order)("two")
    ),
    "the header of a chord": lambda task, order: chord(
        [_member(task, order)("one"), _member(task, order)("two")], between.s(order=order)
    ),
    "the body of a chord": lambda task, order: chord(
        [between.s(order=order), between.s(order=order)], _member(task, order)("end")
    ),
    "nested": _nested,
    "again": lambda task, order: chain(
        between.s(order=order), _member(task, order)("end", shape="the end of a chain")
    ),
    "again in the middle": lambda task, order: chain(
        _member(task, order)("one", shape="the end of a chain"), between.s(order=order)
    ),
    "by way of a plain task": lambda task, order: pass_on.si(order, task.name, 1),
}


def _weave(self: Any, received: Any, order: str, shape: str, part: str, depth: int) -> list[Any]:
    ledger = Ledger.of(self.app)
    if getattr(self, "idempotency", None):
        with ledger.run(order, self.request.id, self.idempotency):
            ledger.wait_for_release(f"{part} of {order}")
            ledger.die_if_requested(part, order)
            if shape and not depth:
                self.replace(SHAPES[shape](self, order))
    elif shape and not depth:
        self.replace(SHAPES[shape](self, order))
    ledger.note(order, part)
    return [part, received]


def weave(
    self: Any, got: Any = None, order: str = "", shape: str = "", part: str = "", depth: int = 0
) -> list[Any]:
    """Replaces itself by the canvas of that `shape`; without one, it is a member of the canvas."""
    return _weave(self, got, order, shape, part, depth)


plain_weave = shared_task(weave, bind=True, base=Task, name="shop.plain_weave")
woven = shared_task(
    weave, bind=True, base=IdempotentTask, name="shop.woven", idempotency_key="{order}"
)
woven_by_id = shared_task(
    weave, bind=True, base=IdempotentTask, name="shop.woven_by_id", idempotency_key=TASK_ID
)
woven_in_sql = shared_task(
    weave,
    bind=True,
    base=IdempotentTask,
    name="shop.woven_in_sql",
    idempotency_key="{order}",
    idempotency_transaction=f"{__name__}:engine",
    idempotency_shadow=False,  # which excludes a transaction, also in an app in shadow
)


@shared_task(
    bind=True,
    base=IdempotentTask,
    name="shop.in_stages",
    idempotency_key="{order}",
    ignore_result=True,
)
def in_stages(self: Any, got: Any = None, order: str = "", stage: int = 0) -> int:
    """Replaces itself by a chain with its next stage; each stage has the same step."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        self.idempotency.step("once", ledger.note, order, "once")
        if stage < 2:
            self.replace(chain(between.si(order=order), in_stages.s(order=order, stage=stage + 1)))
        return stage


@shared_task(bind=True, name="shop.stumble")
def stumble(self: Any, received: Any = None, order: str = "", error: str = "") -> str:
    """A plain Celery task that fails once for each order; notes that it runs."""
    ledger = Ledger.of(self.app)
    ledger.wait_for_release(f"stumble of {order}")
    ledger.note(order, "stumble")
    if len(ledger.notes(order)) == 1:
        raise LookupError(order) if error == "LookupError" else OutOfStockError(order, 1)
    return "done"


FAILING: dict[str, Callable[[str], Signature]] = {
    "a task": lambda order: stumble.si(order=order),
    "the start of a chain": lambda order: chain(
        stumble.si(order=order), between.si(order=f"end of {order}")
    ),
    "the end of a chain": lambda order: chain(
        between.si(order=f"start of {order}"), stumble.si(order=order)
    ),
    "in a group": lambda order: group(
        stumble.si(order=order), between.si(order=f"other of {order}")
    ),
    "the header of a chord": lambda order: chord(
        [stumble.si(order=order), between.si(order=f"other of {order}")],
        between.si(order=f"body of {order}"),
    ),
    "the body of a chord": lambda order: chord(
        [between.si(order=f"one of {order}"), between.si(order=f"two of {order}")],
        stumble.si(order=order),
    ),
    "an expired task": lambda order: stumble.si(order=order).set(expires=-1),
    "an error that ends the key": lambda order: stumble.si(order=order, error="LookupError"),
}


def hand_on(self: Any, order: str, shape: str = "a task", amount: int = 1) -> None:
    """Replaces itself by a canvas that fails once."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        if shape == "an expired task" and not ledger.notes(order):
            ledger.note(order, "expires")
        elif shape == "an expired task":
            shape = "a task"
        self.replace(FAILING[shape](order))


handing_on = task_of(
    hand_on, "handing_on", idempotency_key="{order}", idempotency_replay_errors=(LookupError,)
)
handing_on_reserved = task_of(
    hand_on, "handing_on_reserved", idempotency_key="{order}", idempotency_dedupe_publish=True
)
handing_on_in_turn = task_of(
    hand_on, "handing_on_in_turn", idempotency_key="{order}", idempotency_until="finished"
)


pytestmark = pytest.mark.worker


@pytest.fixture(scope="module")
def shared_shop(open_shop: Callable[..., Shop], tmp_path_factory: Any) -> Iterator[Shop]:
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
    ("task", "shape"),
    [
        *((woven, shape) for shape in SHAPES),
        *((woven_in_sql, shape) for shape in CORNERS),
        *(pytest.param(woven_by_id, shape, marks=pytest.mark.exhaustive) for shape in CORNERS),
    ],
    ids=lambda each: getattr(each, "name", each),
)
class TestEveryShape:
    def test_result_and_executions_are_those_of_plain_celery_despite_a_copy(
        self, shop: Shop, ledger: Ledger, order: str, shape: str, task: Any
    ) -> None:
        expected, members = in_plain_celery(ledger, order, shape)
        call = {"order": order, "shape": shape}
        task.apply_async(kwargs=call, task_id=order, queue="kept")
        message = shop.deliver_kept(order)
        ledger.wait_for_run(order)
        shop.redis.lpush("celery", message)

        assert task.AsyncResult(order).get(timeout=SOON) == expected
        # The replacement may be faster. A copy that is put back goes to the queue "kept".
        ledger.wait_for_signal(order, "completed")
        shop.wait_until_empty()
        shop.replay(message, order)
        assert sorted(ledger.notes(order)) == members


@pytest.mark.core
@pytest.mark.parametrize("shape", exhaustive_except(SHAPES, *CORNERS))
class TestDuplicatesOfEveryShape:
    """Duplicates with another task id."""

    def test_get_the_final_result(self, ledger: Ledger, order: str, shape: str) -> None:
        expected, members = in_plain_celery(ledger, order, shape)
        held_member = members[0]
        ledger.hold(f"{held_member} of {order}")
        first = woven.delay(order=order, shape=shape)
        ledger.wait_for_run(order)
        during = woven.delay(order=order, shape=shape)
        ledger.wait_for_signal(during.id, "conflicted")
        ledger.release(f"{held_member} of {order}")

        assert first.get(timeout=SOON) == expected
        assert during.get(timeout=SOON) == expected
        assert woven.delay(order=order, shape=shape).get(timeout=SOON) == expected
        assert sorted(ledger.notes(order)) == members


class TestWithinAnotherCanvas:
    """The continuation of the replaced task follows its replacement."""

    @pytest.mark.parametrize("shape", exhaustive_except(SHAPES, *CORNERS))
    def test_in_a_chain(self, ledger: Ledger, order: str, shape: str) -> None:
        ends = []
        for name, task in (("plain", plain_weave), ("woven", woven)):
            call = {"order": f"{name} {order}", "shape": shape}
            ends.append(chain(task.s(**call), report.s(order)).delay().get(timeout=SOON))

        assert ends[0] == ends[1]
        assert len(ledger.notes(order)) == 2
        plain, ours = (sorted(ledger.notes(f"{name} {order}")) for name in ("plain", "woven"))
        assert plain == ours

    @pytest.mark.parametrize(
        "shape", exhaustive_except(["in a group", "the body of a chord"], "in a group")
    )
    def test_in_the_header_of_a_chord(self, ledger: Ledger, order: str, shape: str) -> None:
        expected, members = in_plain_celery(ledger, order, shape)
        call = {"order": order, "shape": shape}

        whole = chord([woven.s(**call), woven.s(**call)])(report.s(order)).get(timeout=SOON)

        # Older versions of Celery return the members of a group within a chord in any order.
        assert [sorted(result, key=str) for result in whole] == [sorted(expected, key=str)] * 2
        assert sorted(ledger.notes(order)) == sorted([*members, ledger.notes(order)[-1]])


class TestReplacementWithTheSameKey:
    def test_keeps_the_outcome_without_a_backend_result(self, ledger: Ledger, order: str) -> None:
        in_stages.delay(order=order)
        eventually(
            lambda: len(runs := ledger.runs(order)) == 3 and runs[2].end, "the last stage has run"
        )

        runs = ledger.runs(order)
        assert len({run.key for run in runs}) == len({run.task_id for run in runs}) == 1
        assert [run.attempt for run in runs] == [1, 1, 1]
        assert sorted(run.token for run in runs) == [run.token for run in runs]
        eventually(lambda: in_stages.idempotency_record(order=order).result == 2, "it is stored")

    @pytest.mark.exhaustive
    def test_is_taken_over_when_killed(self, ledger: Ledger, order: str) -> None:
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


class TestReplacementThatFails:
    """Its error frees the key, as an error of the replaced task does."""

    @pytest.mark.core
    @pytest.mark.parametrize("shape", FAILURES)
    def test_the_next_call_runs(self, ledger: Ledger, order: str, shape: str) -> None:
        error_of(handing_on.delay(order, shape))

        assert handing_on.delay(order, shape, amount=2).get(timeout=SOON)
        assert len(ledger.runs(order)) == 2

    def test_one_of_many_callers_runs(self, ledger: Ledger, order: str) -> None:
        error_of(handing_on.delay(order))
        results = [handing_on.delay(order) for _ in range(8)]

        assert [result.get(timeout=SOON) for result in results] == ["done"] * 8
        assert len(ledger.runs(order)) == 2
        assert ledger.notes(order) == ["stumble"] * 2

    def test_those_that_meet_it_while_it_runs(self, ledger: Ledger, order: str) -> None:
        ledger.hold(f"stumble of {order}")
        first = handing_on.delay(order)
        ledger.wait_for_run(order)
        during = ledger.duplicate(handing_on, order)
        ledger.release(f"stumble of {order}")

        error_of(first)
        assert during.get(timeout=SOON) == "done"
        assert len(ledger.runs(order)) == 2

    def test_an_error_that_ends_the_key(self, ledger: Ledger, order: str) -> None:
        first, second = (handing_on.delay(order, "an error that ends the key") for _ in range(2))

        assert type(error_of(first)) is type(error_of(second)) is LookupError
        assert len(ledger.runs(order)) == 1

    @pytest.mark.parametrize(
        "task", [handing_on_reserved, handing_on_in_turn], ids=["dedupe_publish", "finished"]
    )
    def test_in_other_modes(self, task: Any, ledger: Ledger, order: str) -> None:
        first = task.delay(order)
        error_of(first)
        following = task.delay(order)

        assert following.id != first.id
        assert following.get(timeout=SOON) == "done"
        assert len(ledger.runs(order)) == 2

    def test_an_earlier_end_of_the_task_id_is_not_taken_for_its_error(
        self, shop: Shop, ledger: Ledger, order: str
    ) -> None:
        shop.app.backend.mark_as_failure(order, OutOfStockError(order, 0))
        ledger.hold(f"stumble of {order}")
        handing_on.apply_async((order,), task_id=order)
        eventually(lambda: handing_on.idempotency_record(order), "the task has begun")
        eventually(
            lambda: handing_on.idempotency_record(order).state is State.COMPLETED,
            "the task is replaced",
        )
        during = ledger.duplicate(handing_on, order)

        assert len(ledger.runs(order)) == 1
        ledger.release(f"stumble of {order}")
        assert during.get(timeout=SOON) == "done"


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "by way of a plain task"])
def test_eager_result_is_that_of_plain_celery(ledger: Ledger, order: str, shape: str) -> None:
    plain = plain_weave.apply(kwargs={"order": f"plain {order}", "shape": shape})
    ours = woven.apply(kwargs={"order": order, "shape": shape})

    assert (ours.state, ours.result) == (plain.state, plain.result)
    assert sorted(ledger.notes(order)) == sorted(ledger.notes(f"plain {order}"))
    assert woven.idempotency_record(order=order).state is State.COMPLETED
