"""A step of a task returns the same value at first and to every later execution."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from celery_idempotent import IdempotencyError, IdempotentTask
from celery_idempotent.errors import SettingsError
from tests.flow.deliveries import Make


def test_a_name_that_repeats_in_an_execution_is_refused(task: Make) -> None:
    """Also where an earlier execution has stored the value; a step that failed runs again."""

    def book() -> int:
        calls.append(1)
        if len(calls) == 1:
            raise LookupError
        return len(calls)

    def ship(self: Any, order: str) -> None:
        if not calls:
            with pytest.raises(LookupError):
                self.idempotency.step("book", book)
        values.append(self.idempotency.step("book", book))
        values.append(self.idempotency.step("book", book))

    calls: list[int] = []
    values: list[int] = []
    shipping = task(ship)
    for _ in range(2):
        with pytest.raises(IdempotencyError, match="step 'book' has run before in this execution"):
            shipping.delay("1")
    assert values == [2, 2]


async def book() -> str:
    return "booked"


def book_lazily() -> Iterator[str]:
    yield "booked"


async def book_one_by_one() -> AsyncIterator[str]:
    yield "booked"


class Booking:
    async def __call__(self) -> str:
        return "booked"


@pytest.mark.parametrize("protected", [True, False])
@pytest.mark.parametrize(
    "func", [book, partial(book), lambda: book(), Booking(), book_lazily, book_one_by_one]
)
def test_a_step_whose_code_has_not_run_is_refused(task: Make, func: Any, protected: bool) -> None:
    def ship(self: Any, order: str) -> Any:
        with pytest.raises(SettingsError, match="^step 'book' returned an? .*, whose code has not"):
            self.idempotency.step("book", func)
        return self.idempotency.step("book", str, "booked")

    shipping = task(ship)
    assert (shipping.delay("1").get() if protected else shipping("1")) == "booked"


def test_a_plain_call_returns_the_value_as_it_is(task: Make) -> None:
    def book_a_pair(self: Any, order: str) -> Any:
        return self.idempotency.step("book", lambda: (1, 2))

    assert task(book_a_pair)("1") == (1, 2)


def test_a_step_does_not_begin_within_itself_or_after_the_end(task: Make) -> None:
    executions = []

    def body(self: IdempotentTask, order: str) -> None:
        step = self.idempotency.step
        executions.append(self.idempotency)
        with pytest.raises(IdempotencyError, match="step 'charge' is running"):
            step("charge", lambda: step("charge", int))

    task(body).delay("1")
    with pytest.raises(IdempotencyError, match="begins after the end of its execution"):
        executions[0].step("mail", int)
