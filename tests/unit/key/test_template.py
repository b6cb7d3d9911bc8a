"""Rules written as a template: ``"order:{order_id}"``."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from enum import Enum, IntEnum
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from celery_idempotent.errors import KeyRuleError, SettingsError
from tests.unit.key.rules import Task, rule_of

pytestmark = pytest.mark.core


def charge(order: Any, amount: Any = 0, **options: Any) -> None: ...


def test_only_the_arguments_named_decide_the_key() -> None:
    task = Task(charge, "order:{order}")

    assert task.name(42, amount=1) == task.name(42, amount=2)
    assert task.name(42) != task.name(43)


def test_the_other_arguments_are_told_apart_by_the_fingerprint() -> None:
    task = Task(charge, "order:{order}")

    assert task(42, 1).fingerprint == task(order=42, amount=1).fingerprint
    assert task(42, 1).fingerprint != task(42, 2).fingerprint
    assert task(42).fingerprint == task(42, 0).fingerprint
    assert len(task(42).fingerprint) == 8


def test_the_fingerprint_bears_an_argument_of_any_type() -> None:
    task = Task(charge, "order:{order}")

    assert task(42, object()) == task(42, object())
    assert task(42, object()).fingerprint != task(42).fingerprint


def test_a_default_fills_its_field() -> None:
    assert Task(charge, "{order}:{amount}").name(1) == Task(charge, "{order}:{amount}").name(1, 0)


def test_fields_reach_into_attributes_and_items() -> None:
    task = Task(charge, "{order[customer][id]}-{amount.value:.2f}")

    def call(customer: int, value: float, **other: Any) -> str:
        return task.name({"customer": {"id": customer}, **other}, SimpleNamespace(value=value))

    assert call(7, 1.001, date="today") == call(7, 1.004, date="tomorrow")
    assert call(7, 1.0) != call(8, 1.0)
    assert call(7, 1.0) != call(7, 2.0)


def test_conversions_and_formats_are_those_of_str_format() -> None:
    for template, value, text in [
        ("{order!r}", "x", "'x'"),
        ("{order:>5}", "x", "    x"),
        ("{order:%Y-%m}", date(2026, 11, 21), "2026-11"),
        ("{order:05d}", 42, "00042"),
        ("{{{order}}}", 42, "{42}"),
        ("{order}", UUID(int=1), str(UUID(int=1))),
        ("{order}", Decimal("1.10"), "1.10"),
    ]:
        assert Task(charge, template).name(value) == Task(charge).rule.of_text(text).__str__()


def test_an_extra_keyword_argument_can_be_named() -> None:
    task = Task(charge, "{order}:{region}")

    assert task.name(1, region="eu") != task.name(1, region="us")
    with pytest.raises(KeyRuleError, match="region"):
        task(1)


def test_a_separator_inside_a_value_makes_no_duplicates() -> None:
    for template in (
        "{order}:{amount}",
        "{order}{amount}",
        "{order}::{amount}:",
        "{order}{{{amount}",
    ):
        task = Task(charge, template)
        pieces = ["", ":", "::", "a", "a:", ":a", "a:b", "{", "{a", "a{"]

        keys = {task.name(one, other) for one, other in product(pieces, pieces)}

        assert len(keys) == len(pieces) ** 2, template


def test_control_characters_and_megabytes_are_hashed() -> None:
    name = Task(charge, "{order}").name("\0\n{}" + "x" * 10_000_000)

    assert name.isprintable()
    assert len(name) < 40


def test_a_field_that_cannot_be_filled_is_told_without_its_value() -> None:
    for template, value, why in [
        ("{order.id}", {"id": "secret"}, "AttributeError"),
        ("{order[id]}", ["secret"], "TypeError"),
        ("{order[id]}", {"secret": 1}, "KeyError"),
        ("{order:d}", "secret", "ValueError"),
    ]:
        with pytest.raises(KeyRuleError) as caught:
            Task(charge, template)(value)
        assert str(caught.value).startswith("shop.charge: idempotency_key cannot fill {order")
        assert why in str(caught.value)
        assert "secret" not in str(caught.value)
        assert caught.value.__suppress_context__


class Plain:
    """Prints its address in memory."""


class Named(Plain):
    def __str__(self) -> str:
        return "named"


@pytest.mark.parametrize("template", ["{order}", "{order!r}", "{order!s}"])
@pytest.mark.parametrize(
    "value",
    [
        Plain(),
        [Plain()],
        {"a": (Plain(),)},
        lambda: 0,
        "text".title,
        partial(charge, 1),
        iter([1]),
        {"a", "b"},
        [frozenset("ab")],
        {"a": 1, "b": 2},
    ],
    ids=[
        "object",
        "object-in-list",
        "object-in-dict",
        "lambda",
        "method",
        "partial",
        "iterator",
        "set",
        "set-in-list",
        "dict",
    ],
)
def test_what_prints_differently_for_two_callers_is_refused(template: str, value: Any) -> None:
    with pytest.raises(KeyRuleError) as caught:
        Task(charge, template)(value)

    assert "0x" not in str(caught.value)


def test_a_field_that_names_a_method_by_mistake_is_refused() -> None:
    # A title that came as text: str has a method of that name, and its text is an address.
    with pytest.raises(KeyRuleError):
        Task(charge, "{order.title}")("a book")


class Currency(str, Enum):
    EUR = "eur"


class Level(IntEnum):
    HIGH = 3


def test_a_member_that_is_text_or_a_number_is_written_as_that() -> None:
    # Python 3.10 prints the value where later ones print the name, or the other way round.
    task = Task(charge, "{order}")

    assert task.name(Currency.EUR) == task.name("eur")
    assert task.name(Level.HIGH) == task.name(3)
    assert Task(charge, lambda order: Level.HIGH).name(1) == Task(charge, lambda order: 3).name(1)


def test_an_extra_keyword_does_not_pass_for_a_parameter() -> None:
    def refund(order: Any, /, **options: Any) -> None: ...

    task = Task(refund, "{order}")

    assert task.name(1, order=7) == task.name(1)
    assert task(1, order=7).fingerprint != task(1).fingerprint


def test_what_prints_a_text_of_its_own_is_taken() -> None:
    task = Task(charge, "{order}")

    assert task.name(Named()) == task.name("named")
    assert task.name("at 0x7f3a") == task.name("at 0x7f3a")


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("order", "has no field"),
        ("", "has no field"),
        ("{{order}}", "has no field"),
        ("{}", "name the argument"),
        ("{0}", "name the argument"),
        ("{order:{amount}}", "nested format fields are not supported"),
        ("{order", "'{order'"),
        ("order}", "'order}'"),
    ],
)
def test_a_template_that_cannot_work_is_refused_at_start(template: str, complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        rule_of(charge, template)

    assert str(caught.value).startswith("shop.charge: idempotency_key ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_conversion_that_does_not_exist_is_refused_at_start() -> None:
    with pytest.raises(SettingsError, match="shop.charge: idempotency_key"):
        rule_of(charge, "{order!x}")


def test_a_template_that_names_an_argument_the_task_lacks_is_refused_at_start() -> None:
    def refund(order_id: Any, amount: Any) -> None: ...

    with pytest.raises(SettingsError) as caught:
        rule_of(refund, "order:{oder_id}")

    assert str(caught.value) == (
        "shop.charge: idempotency_key names 'oder_id', which the task does not take "
        "(it takes: order_id, amount)"
    )
