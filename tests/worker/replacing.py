"""Tasks that replace themselves by a canvas that includes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Task, chain, chord, group, shared_task
from celery.canvas import Signature

from celery_idempotent import TASK_ID, IdempotentTask
from tests.worker.failing_tasks import OutOfStockError
from tests.worker.ledger import Ledger
from tests.worker.tasks import task_of


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
    idempotency_transaction="tests.worker.sqlite_engine:engine",
    idempotency_shadow=False,  # which excludes a transaction, also in an app in shadow
)


def spread(self: Any, item: str, order: str, shape: str = "") -> str:
    """Replaces itself by a map of itself in the first execution."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        if len(ledger.runs(order)) == 1:
            self.replace(MAPS[shape](self, item, order, shape))
        return item


MAPS: dict[str, Callable[..., Signature]] = {
    "starmap": lambda task, *call: task.starmap([call, call]),
    "chunks": lambda task, *call: task.chunks([call, call], 1).group(),
    "starmap in a chain": lambda task, *call: chain(
        task.starmap([call, call]), between.s(order=call[1])
    ),
}

spread_out = shared_task(spread, bind=True, base=IdempotentTask, name="shop.spread_out")


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
    hand_on,
    "handing_on_reserved",
    idempotency_key="{order}",
    idempotency_dedupe_publish=True,
)
handing_on_in_turn = task_of(
    hand_on, "handing_on_in_turn", idempotency_key="{order}", idempotency_until="finished"
)


@shared_task(bind=True, base=IdempotentTask, name="shop.pass_headers_on", idempotency_key="{order}")
def pass_headers_on(self: Any, got: Any = None, order: str = "", stage: int = 0) -> int:
    """Publishes itself in the last stage, independently of the canvas, with its own headers."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        if stage == 0:
            self.replace(chain(between.si(order=order), pass_headers_on.s(order=order, stage=1)))
        pass_headers_on.apply_async(
            kwargs={"order": order, "stage": 1}, headers=self.request.headers
        )
        return stage
