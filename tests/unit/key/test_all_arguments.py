"""The default rule: calls with equal arguments are duplicates."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.conftest import Task

pytestmark = pytest.mark.core


def charge(order_id: Any, amount: Any = 0, *, note: Any = "") -> None: ...


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((1, 2), {}), ((1,), {"amount": 2})),
        (((1, 2), {}), ((), {"amount": 2, "order_id": 1})),
        (((1,), {}), ((1, 0), {})),
        (((1,), {}), ((1,), {"note": "", "amount": 0})),
    ],
)
def test_equal_calls_have_one_key(one: Any, other: Any) -> None:
    task = Task(charge)

    assert task(*one[0], **one[1]) == task(*other[0], **other[1])


def test_values_of_different_arguments_are_not_mixed_up() -> None:
    task = Task(charge)

    assert task.name(1, note="x") != task.name(1, amount="x")
    assert task.name("a", "bc") != task.name("ab", "c")


def test_tasks_never_share_a_key() -> None:
    one, other = Task(charge, task="shop.charge"), Task(charge, task="shop.refund")

    assert one(1).digest != other(1).digest


def test_a_new_parameter_with_a_default_changes_no_key() -> None:
    def before(order_id: Any) -> None: ...

    def after(order_id: Any, currency: Any = "EUR", *, tags: Any = (), **options: Any) -> None: ...

    assert Task(before)(42) == Task(after)(42)
    assert Task(after)(42, "EUR", tags=[]) == Task(after)(42)
    assert Task(after)(42, "USD") != Task(after)(42)


def test_a_default_without_a_canonical_form_is_left_out_too() -> None:
    sentinel = object()

    def before(order_id: Any) -> None: ...

    def after(order_id: Any, client: Any = sentinel) -> None: ...

    assert Task(before)(42) == Task(after)(42)
    assert Task(before)(42) == Task(after)(42, sentinel)


def test_extra_arguments_are_part_of_the_key() -> None:
    def report(first: Any, *rest: Any, **options: Any) -> None: ...

    task = Task(report)

    keys = [task.name(1), task.name(1, 2), task.name(1, [2]), task.name(1, 2, 3)]
    keys += [task.name(1, rest=2), task.name(1, rest=(2,)), task.name(1, options={"rest": 2})]

    assert len(set(keys)) == len(keys)
    assert task.name(1, a=1, b=2) == task.name(1, b=2, a=1)


def test_positional_only_parameters_are_bound_by_position() -> None:
    def report(first: Any, /, second: Any = None, **options: Any) -> None: ...

    task = Task(report)

    assert task(1, 2) == task(1, second=2)
    assert task(1, first=2) != task(1, second=2)


def test_arguments_that_do_not_fit_the_signature_are_a_type_error() -> None:
    task = Task(charge)

    for args, kwargs in [((), {}), ((1, 2, 3), {}), ((1,), {"order_id": 1}), ((1,), {"x": 1})]:
        with pytest.raises(TypeError):
            task(*args, **kwargs)


def test_names_that_are_not_keywords_are_a_type_error() -> None:
    def positional_only(first: Any, /) -> None: ...

    def several(first: Any, *rest: Any) -> None: ...

    with pytest.raises(TypeError):
        Task(positional_only)(first=1)
    with pytest.raises(TypeError):
        Task(several)(1, rest=2)


def test_a_key_is_plain_text_for_any_arguments() -> None:
    name = Task(charge).name("{curly}\n\r\0\x1b[31m " + "megabytes" * 200_000)

    assert re.fullmatch(r"shop\.charge:[A-Za-z0-9_-]{22}", name)
