"""What the type checkers infer for each part of the public interface."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from typing_extensions import assert_type

from celery_idempotent import Idempotency, IdempotencyError, IdempotentTask, Record, State
from celery_idempotent.contrib import fastapi, flask
from celery_idempotent.contrib.asgi import by_header
from celery_idempotent.core.flow.execution import Execution
from celery_idempotent.functions.block import AsyncBlockExecution, BlockExecution

idem = Idempotency("redis://")


@idem.idempotent
def charge(order_id: int, *, amount: float = 1.0) -> str:
    """A function whose signature stays."""
    return f"{order_id}:{amount}"


@idem.idempotent(key="order:{order_id}", lease=30.0)
async def ship(order_id: int) -> bytes:
    """A coroutine function whose signature stays."""
    return bytes(order_id)


async def functions() -> None:
    """Decorated functions keep the types of their parameters and results."""
    assert_type(charge(1, amount=2.0), str)
    assert_type(await ship(1), bytes)
    charge("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    charge(1, 2.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@fastapi.idempotent_route(idem, identity=by_header("authorization"))
async def pay(order_id: int, *, amount: float = 1.0) -> str:
    """An endpoint whose signature stays."""
    return f"{order_id}:{amount}"


@flask.idempotent_route(idem, identity=by_header("authorization"))
def pay_view(order_id: int) -> dict[str, int]:
    """A view whose signature stays."""
    return {"paid": order_id}


async def endpoints() -> None:
    """Decorated endpoints keep the types of their parameters and results."""
    assert_type(await pay(1, amount=2.0), str)
    assert_type(pay_view(1), dict[str, int])
    await pay("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    pay_view()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def blocks() -> None:
    """Blocks and steps."""
    with idem.execution("order-42", fingerprint={"amount": 999}) as execution:
        assert_type(execution, BlockExecution)
        assert_type(execution.token, int)
        assert_type(execution.attempt, int)
        assert_type(execution.step("book", charge, 1), str)
    assert_type(idem.current.step("book", charge, 1), Any)


async def async_blocks() -> None:
    """Blocks and steps of coroutines."""
    async with idem.execution("order-42") as execution:
        assert_type(execution, AsyncBlockExecution)
        assert_type(await execution.step("ship", ship, 1), bytes)


def records() -> None:
    """Records that the engine finds."""
    for record in idem.records(state=State.STARTED):
        fields(record)


def fields(record: Record) -> None:
    """The fields of a record."""
    assert_type(record.key, str)
    assert_type(record.state, State)
    assert_type(record.token, int)
    assert_type(record.finished_at, datetime | None)


class ChargeTask(IdempotentTask):
    """A task class of a user, with options as attributes."""

    idempotency_key = "order:{order_id}"
    idempotency_lease = 30.0
    idempotency_replay_errors = (ValueError, IdempotencyError)

    def run(self, order_id: int) -> str:
        """The body."""
        assert_type(self.idempotency, Execution)
        return self.idempotency.step("book", charge, order_id)


def tasks(task: ChargeTask) -> None:
    """Records of a task's calls."""
    assert_type(task.idempotency_record(42, amount=999), Record | None)
    assert_type(task.idempotency_forget(42), bool)


def rules() -> Callable[..., Any]:
    """A key rule that is a function."""

    def by_order(order_id: int, **_: Any) -> tuple[str, int]:
        return "order", order_id

    return idem.idempotent(key=by_order)(charge)
