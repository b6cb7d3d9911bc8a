"""``task.idempotency_forget``: a running call is forgotten only with force."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis

from celery_idempotent import TASK_ID, ConflictError
from celery_idempotent.testing import IsolatedRecords
from tests.flow.deliveries import Make


def run(self: Any, order: str, force: bool = True) -> str:
    return order


@pytest.mark.parametrize("until", ["expired", "finished", "started"])
def test_a_running_call_is_forgotten_with_force_alone(task: Make, until: str) -> None:
    def body(self: Any, order: str) -> bool:
        with pytest.raises(ConflictError) as caught:
            charge.idempotency_forget(order)
        errors.append(caught.value)
        return charge.idempotency_forget(order, force=True)

    errors: list[ConflictError] = []
    charge = task(body, until=until)
    result = charge.delay("1")

    assert result.get() is True
    (error,) = errors
    assert error.task_id == result.id
    assert str(error) == (
        f"{charge.idempotency_key_of('1')} is running as task {result.id}; pass force=True to "
        "forget it, so that another execution can begin beside it"
    )
    assert charge.idempotency_forget("1") is False


@pytest.mark.parametrize("args", [(), (7,), ("1", True)])
def test_a_call_whose_key_is_its_task_id_is_named_by_it(task: Make, args: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"its key is the task id: pass only that, result\.id"):
        task(run, key=TASK_ID).idempotency_forget(*args)


def test_a_call_with_an_ended_lease_is_forgotten(task: Make, idempotency: IsolatedRecords) -> None:
    charge = task(run)
    idempotency.crash(charge, "1")

    assert charge.idempotency_forget("1") is True


@pytest.mark.parametrize("command", ["SET", "RPUSH"])
def test_a_record_that_cannot_be_read_is_forgotten(task: Make, client: Redis, command: str) -> None:
    charge = task(run)
    client.execute_command(command, f"idem:{charge.idempotency_key_of('1')}", "garbage")

    assert charge.idempotency_forget("1") is True


def test_an_argument_named_force_is_ambiguous(task: Make) -> None:
    sync = task(run)
    sync.delay("1", force=False)

    with pytest.raises(TypeError, match="the task also has a parameter force: pass its arguments"):
        sync.idempotency_forget("1", force=False)
    assert sync.idempotency_forget("1", False) is True
