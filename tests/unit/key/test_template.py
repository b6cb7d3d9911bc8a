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
from tests.unit.conftest import Task, rule_of

pytestmark = pytest.mark.core


def charge(order: Any, amount: Any = 0, **options: Any) -> None: ...


def test_the_fingerprint_distinguishes_the_other_arguments() -> None:
    task = Task(charge, "order:{order}")

    assert task(42, 1).fingerprint == task(order=42, amount=1).fingerprint
    assert task(42, 1).fingerprint != task(42, 2).fingerprint
    assert task(42).fingerprint == task(42, 0).fingerprint
    assert len(task(42).fingerprint) == 8


def test_the_fingerprint_allows_arguments_of_any_type() -> None:
    task = Task(charge, "order:{order}")

    assert task(42, object()) == task(42, object())
    assert task(42, object()).fingerprint != task(42).fingerprint


def test_fields_can_name_attributes_and_items() -> None:
    task = Task(charge, "{order[customer][id]}-{amount.value:.2f}")

    def call(customer: int, value: float, **other: Any) -> str:
        return task.name({"customer": {"id": customer}, **other}, SimpleNamespace(value=value))

    assert call(7, 1.001, date="today") == call(7, 1.004, date="tomorrow")
    assert call(7, 1.0) != call(8, 1.0)
    assert call(7, 1.0) != call(7, 2.0)
    assert task.rule.names == ["order", "amount"]


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
        returns_text = Task(charge, lambda *args, text=text: text)
        assert Task(charge, template).name(value) == returns_text.name(value)


def test_a_field_can_name_an_extra_keyword_argument() -> None:
    task = Task(charge, "{order}:{region}")

    assert task.name(1, region="eu") != task.name(1, region="us")
    with pytest.raises(KeyRuleError, match="region"):
        task(1)


def test_a_separator_inside_a_value_does_not_cause_duplicates() -> None:
    pieces = ["", ":", "::", "a", "a:", ":a", "a:b", "{", "{a", "a{"]
    for separator, end in ((":", ""), ("", ""), ("::", ":"), ("{{", "")):
        template = f"{{order}}{separator}{{amount}}{end}"
        task = Task(charge, template)

        keys = {task.name(one, other) for one, other in product(pieces, pieces)}

        assert len(keys) == len(pieces) ** 2, template


def test_the_error_of_a_field_that_cannot_be_filled_does_not_quote_the_value() -> None:
    for template, value, reason in [
        ("{order.id}", {"id": "secret"}, "AttributeError ('order' is of type dict)"),
        ("{order[id]}", ["secret"], "TypeError"),
        ("{order[id]}", {"secret": 1}, "KeyError"),
        ("{order:d}", "secret", "ValueError"),
    ]:
        with pytest.raises(KeyRuleError) as caught:
            Task(charge, template)(value)
        assert str(caught.value).startswith("shop.charge: idempotency_key cannot fill {order")
        assert reason in str(caught.value)
        assert "secret" not in str(caught.value)
        assert type(caught.value.__cause__).__name__ == reason.partition(" ")[0]


class Plain:
    """Its text holds its memory address."""


class Named(Plain):
    def __str__(self) -> str:
        return "named"


#: Values whose text differs among processes.
UNSTABLE: dict[str, Any] = {
    "object": Plain(),
    "object in dict": {"a": (Plain(), Plain())},
    "lambda": lambda: 0,
    "method": "text".title,
    "partial": partial(charge, 1),
    "iterator": iter([1]),
    "set": {"a", "b"},
    "set in list": [frozenset("ab")],
    "dict": {"a": 1, "b": 2},
}


@pytest.mark.parametrize("template", ["{order}", "{order!r}", "{order!s}"])
@pytest.mark.parametrize("value", UNSTABLE.values(), ids=UNSTABLE)
def test_a_value_whose_text_differs_among_processes_is_rejected(template: str, value: Any) -> None:
    with pytest.raises(KeyRuleError) as caught:
        Task(charge, template)(value)

    assert "0x" not in str(caught.value)


def test_a_field_that_names_a_method_by_mistake_is_rejected() -> None:
    # If the title is passed as text, the field names a method of str, whose text is an address.
    with pytest.raises(KeyRuleError):
        Task(charge, "{order.title}")("a book")


class Currency(str, Enum):
    EUR = "eur"


class Level(IntEnum):
    HIGH = 3


def test_an_enum_member_that_is_text_or_a_number_is_encoded_as_that() -> None:
    # Its text is the name in some versions of Python, and the value in others.
    task = Task(charge, "{order}")

    assert task.name(Currency.EUR) == task.name("eur")
    assert task.name(Level.HIGH) == task.name(3)
    assert Task(charge, lambda order: Level.HIGH).name(1) == Task(charge, lambda order: 3).name(1)


def test_an_extra_keyword_is_not_mistaken_for_a_parameter() -> None:
    def refund(order: Any, /, **options: Any) -> None: ...

    task = Task(refund, "{order}")

    assert task.name(1, order=7) == task.name(1)
    assert task(1, order=7).fingerprint != task(1).fingerprint


def test_a_value_with_a_text_of_its_own_is_accepted() -> None:
    task = Task(charge, "{order}")

    assert task.name(Named()) == task.name("named")
    assert task.name("at 0x7f3a") == task.name("at 0x7f3a")
    with pytest.raises(KeyRuleError):
        Task(charge, "{order!r}")(Named())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("order", "has no field"),
        ("", "has no field"),
        ("{{order}}", "has no field"),
        ("{}", "name the argument"),
        ("{0}", "name the argument"),
        ("{order:{amount}}", "nested format fields are not supported"),
        ("{order!x}", "'{order!x}'"),
        ("{order", "'{order'"),
        ("order}", "'order}'"),
    ],
)
def test_an_invalid_template_is_rejected_at_start(template: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        rule_of(charge, template)

    assert str(caught.value).startswith("shop.charge: idempotency_key ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_with_an_unknown_argument_is_rejected_at_start() -> None:
    def refund(order_id: Any, amount: Any) -> None: ...

    with pytest.raises(SettingsError) as caught:
        rule_of(refund, "order:{oder_id}")

    assert str(caught.value) == (
        "shop.charge: idempotency_key names 'oder_id', which the task does not take "
        "(it takes: order_id, amount)"
    )
