"""A step of a task returns the same value at first and to every later execution."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotencyError, IdempotentTask, ResultNotStoredError
from celery_idempotent.errors import SettingsError

Make = Callable[..., IdempotentTask]


class Money:
    pass


class OutOfStockError(Exception):
    pass


@pytest.fixture
def values_of(task: Make) -> Callable[..., list[Any]]:
    """Returns what a step returns to two executions of a task; the first one ends with an error."""

    def values_of(value: Any, **options: Any) -> list[Any]:
        values: list[Any] = []

        def ship(self: Any, order: str) -> None:
            run = (lambda: value) if not values else (lambda: "of a second run")
            values.append(self.idempotency.step("book", run))
            if len(values) == 1:
                raise OutOfStockError

        shipping = task(ship, **options)
        with pytest.raises(OutOfStockError):
            shipping.delay("1")
        shipping.delay("1")
        return values

    return values_of


@pytest.mark.parametrize(
    ("serializer", "expected"), [("json", [1, {"2": 3}]), ("pickle", (1, {2: 3}))]
)
def test_the_first_execution_got_a_tuple_and_the_next_one_a_list(
    app: Celery, values_of: Callable[..., list[Any]], serializer: str, expected: Any
) -> None:
    app.conf.accept_content = ["json", "pickle"]

    assert values_of((1, {2: 3}), serializer=serializer) == [expected, expected]


def test_a_value_that_cannot_be_serialized_is_refused(task: Make) -> None:
    runs: list[int] = []

    def book() -> Any:
        runs.append(1)
        return {"price": Money()}

    def ship(self: Any, order: str) -> Any:
        return self.idempotency.step("book", book)

    shipping = task(ship)
    for _ in range(2):
        with pytest.raises(ResultNotStoredError, match=r"^step 'book' .*\.Money, inside a value"):
            shipping.delay("1")
    assert runs == [1]


def test_a_name_that_repeats_in_an_execution_is_refused(task: Make) -> None:
    """Also where an earlier execution has stored the value; a step that failed runs again."""

    def book() -> int:
        calls.append(1)
        if len(calls) == 1:
            raise OutOfStockError
        return len(calls)

    def ship(self: Any, order: str) -> None:
        if not calls:
            with pytest.raises(OutOfStockError):
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
def test_a_function_whose_code_has_not_run_is_refused(
    task: Make, func: Any, protected: bool
) -> None:
    def ship(self: Any, order: str) -> Any:
        with pytest.raises(SettingsError, match="^step 'book' returned an? .*, whose code has not"):
            self.idempotency.step("book", func)
        return self.idempotency.step("book", str, "booked")

    shipping = task(ship)
    assert (shipping.delay("1").get() if protected else shipping("1")) == "booked"


def book_a_pair(self: Any, order: str) -> Any:
    booked = self.idempotency.step("book", lambda: (1, 2))
    return type(booked).__name__


def test_a_plain_call_returns_the_value_as_it_is(task: Make) -> None:
    assert task(book_a_pair)("1") == "tuple"


def test_without_a_store_the_types_are_the_same(task: Make) -> None:
    unavailable = {"redis_url": "redis://127.0.0.1:1", "redis_timeout": 0.2}
    shipping = task(book_a_pair, on_store_error="run", **unavailable)

    assert shipping.delay("1").get() == "list"


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
