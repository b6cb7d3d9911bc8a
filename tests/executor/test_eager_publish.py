"""``idempotency_dedupe_publish`` in eager mode, where publishing runs the task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent import IdempotentTask


def test_the_second_call_gets_the_first_one_s_result(task: Callable[..., IdempotentTask]) -> None:
    runs: list[int] = []

    def charge(self: Any, order: int) -> str:
        runs.append(order)
        return f"receipt {len(runs)}"

    charge_once = task(charge, dedupe_publish=True)

    assert [charge_once.delay(7).get() for _ in range(2)] == ["receipt 1", "receipt 1"]
    assert runs == [7]


def test_an_error_frees_the_key_for_the_next_call(task: Callable[..., IdempotentTask]) -> None:
    runs: list[int] = []

    def charge(self: Any, order: int) -> str:
        runs.append(order)
        if len(runs) == 1:
            raise ConnectionError("the bank is away")
        return "receipt"

    charge_once = task(charge, dedupe_publish=True)

    with pytest.raises(ConnectionError):
        charge_once.delay(7)
    assert charge_once.delay(7).get() == "receipt"
