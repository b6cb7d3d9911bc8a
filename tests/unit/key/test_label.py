"""Labels: readable names of calls, from a template."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from celery_idempotent.errors import SettingsError
from celery_idempotent.extensions.label import Label
from tests.unit.conftest import celery, error_of, rule_of


def charge(order: Any, amount: Any = 7, **options: Any) -> None: ...


def label(template: Any) -> Label:
    return Label(rule_of(charge, None), template)


def test_a_template_is_filled_with_arguments_defaults_and_extra_keywords() -> None:
    assert label("{order}: {amount:.2f} {tenant}").of((1,), {"tenant": "acme"}) == "1: 7.00 acme"


def test_what_callers_pass_cannot_forge_a_line_or_a_tag() -> None:
    shown = label("order {order}").of(("1\nERROR <b>\x1b[2J",), {})

    assert shown == "order 1\\x0aERROR \\x3cb\\x3e\\x1b[2J"


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("secret 4711")


@pytest.mark.parametrize(
    ("template", "args"),
    [
        ("{order.name}", (42,)),
        ("{order}", (Unprintable(),)),
        ("{order:d}", ("x",)),
        ("{order}", ()),
    ],
)
def test_a_label_that_cannot_be_made_is_left_out_and_logged_once(
    template: str, args: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    labels = label(template)

    assert [labels.of(args, {}) for _ in range(3)] == ["", "", ""]
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("celery_idempotent.extensions.label", logging.WARNING)
    assert "secret" not in record.getMessage()
    assert "4711" not in record.getMessage()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("order", "shop.charge: idempotency_label 'order' has no field"),
        ("{}", "shop.charge: idempotency_label '{}': name the argument"),
        ("{order", "shop.charge: idempotency_label '{order'"),
        (42, "shop.charge: idempotency_label must be a template, not int"),
    ],
)
def test_a_template_is_validated_in_one_line(template: Any, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        label(template)

    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_an_argument_that_the_task_does_not_take_is_refused_when_the_task_is_defined() -> None:
    error = error_of(celery(), idempotency_label="{ordr}")

    assert re.search(r"idempotency_label names 'ordr', .*it takes: order", error)
