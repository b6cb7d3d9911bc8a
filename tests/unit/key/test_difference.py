"""Which argument differs between two calls with one key."""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from tests.unit.conftest import rule_of

ID = "12345678-1234-5678-1234-567812345678"


def charge(order_id: Any, amount: Any = 0, note: Any = None, **more: Any) -> None: ...


def pay(order_id: Any, amount: Any = 0) -> None: ...


def difference(
    first: Any, second: Any, key: Any = ("order_id",), function: Any = charge, explicit: Any = None
) -> str:
    """Returns how the second call differs from the first one."""
    rule = rule_of(function, key)
    keys = [rule.derive(args, {}, explicit_key=explicit) for args in (first, second)]
    assert str(keys[0]) == str(keys[1])
    assert keys[0].fingerprint != keys[1].fingerprint
    return rule.difference(second, {}, keys[1], keys[0].fingerprint)


@pytest.mark.parametrize(
    ("was", "now", "types"),
    [
        (30, 30.0, ("int", "float")),
        (30.0, 30, ("float", "int")),
        (30, "30", ("int", "str")),
        ("30", 30, ("str", "int")),
        ("30.5", 30.5, ("str", "float")),
        (1, True, ("int", "bool")),
        (Decimal("30.5"), "30.5", ("Decimal", "str")),
        (ID, UUID(ID), ("str", "UUID")),
        (UUID(ID), ID, ("UUID", "str")),
    ],
)
def test_another_type_of_an_argument_is_named(was: Any, now: Any, types: tuple[str, str]) -> None:
    text = "argument 'amount' was of type {}, and is of type {}".format(*types)

    assert difference((1, was, "note"), (1, now, "note")) == text


def test_an_argument_of_any_type_hides_no_other_one() -> None:
    expected = "argument 'amount' was of type int, and is of type str"

    assert difference((1, 30, object()), (1, "30", object())) == expected


NAMES, ORDER = ("order_id",), {"id": 1}
SEVERAL, REST = "one or more of the arguments {} differ", "'amount', 'note', 'more'"
ANOTHER_TYPE = "argument 'order_id' was of type int, and is of type str"
ALL = SEVERAL.format(f"'order_id', {REST}")


@pytest.mark.parametrize(
    ("key", "function", "first", "second", "text"),
    [
        ("{order_id}", charge, (42,), ("42",), ANOTHER_TYPE),
        (NAMES, charge, (1, 30), (1, 30, "note"), "argument 'note' was not passed"),
        # The only argument that the key leaves open, and several.
        (NAMES, pay, (1, 30), (1, 40), "argument 'amount' differs"),
        ("{order_id}", pay, (1, 30), (1, 40), "argument 'amount' differs"),
        (NAMES, charge, (1, 30), (1, 40), SEVERAL.format(REST)),
        ("{order_id[id]}", charge, (ORDER, 30), (ORDER, 40), ALL),
        (lambda order_id, *_, **__: "one", charge, (1, 30), (1, 40), ALL),
        ("{order_id:.0f}", pay, (30.1,), (30.2,), SEVERAL.format("'order_id', 'amount'")),
    ],
)
def test_what_the_key_leaves_open(
    key: Any, function: Any, first: Any, second: Any, text: str
) -> None:
    assert difference(first, second, key, function) == text


@pytest.mark.parametrize("key", [None, NAMES, "{order_id}"])
def test_an_explicit_key_leaves_every_argument_open(key: Any) -> None:
    assert difference((1, 30), (2, 40), key, explicit="req-7f3a") == ALL


def test_no_value_is_shown() -> None:
    assert "secret" not in difference((1, "secret"), (1, "secret 2", "secret 3"))
