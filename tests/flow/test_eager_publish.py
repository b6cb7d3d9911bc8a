"""``idempotency_dedupe_publish`` in eager mode, where publishing runs the task."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from celery import Celery, chain

from celery_idempotent import TASK_ID, ConflictError, IdempotentTask, State
from tests.flow.deliveries import Make


def test_a_call_gets_the_result_of_the_one_before_which_an_error_is_not(task: Make) -> None:
    runs: list[int] = []

    def charge(self: Any, order: int) -> str:
        runs.append(order)
        if len(runs) == 1:
            raise ConnectionError("the bank is away")
        return f"receipt {len(runs)}"

    charge_once = task(charge, dedupe_publish=True)

    with pytest.raises(ConnectionError):
        charge_once.delay(7)
    assert [charge_once.delay(7).get() for _ in range(2)] == ["receipt 2"] * 2
    assert runs == [7, 7]


@pytest.mark.parametrize("publish", ["delay", "apply"])
@pytest.mark.parametrize("dedupe", [True, False])
@pytest.mark.parametrize("propagates", [True, False])
def test_a_body_that_calls_its_own_key_reserves_no_turn(
    task: Make, publish: str, dedupe: bool, propagates: bool
) -> None:
    def refresh(self: Any, depth: int) -> None:
        self.app.conf.task_eager_propagates = propagates
        if not depth:
            return
        result = None
        with contextlib.suppress(ConflictError):
            result = getattr(self, publish)(*((0,) if publish == "delay" else ((0,),)))
        assert result is None or isinstance(result.result, ConflictError)

    once = task(refresh, key=lambda depth: "page", until="started", dedupe_publish=dedupe)
    once.delay(1).get()

    assert once.idempotency_record(1).state is State.COMPLETED
    assert once.delay(0).get() is None


@pytest.mark.parametrize("until", ["expired", "finished"])
def test_links_of_an_eager_chain_share_an_id_and_no_key(app: Celery, until: str) -> None:
    @app.task(
        base=IdempotentTask, name=f"add {until}", idempotency_key=TASK_ID, idempotency_until=until
    )
    def add(x: int, y: int) -> int:
        return x + y

    result = chain(add.s(1), add.s(1)).apply_async((1,), task_id="of both")

    assert result.get() == 3
