"""Calls whose keys must never change: a release that changes one runs its users' tasks again.

Run as a program it prints their keys as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from celery_idempotent import TASK_ID
from celery_idempotent.key.key import Key
from tests.unit.key.rules import rule_of


class Colour(Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: int


def charge(order_id: Any = None, amount: Any = 0, *rest: Any, **options: Any) -> None: ...


def _call(key: Any, *args: Any, **kwargs: Any) -> Callable[[], Key]:
    return lambda: rule_of(charge, key).derive(args, kwargs, task_id="a-task-id")


def _with_key(key: str | list[str], *args: Any) -> Callable[[], Key]:
    return lambda: rule_of(charge).derive(args, {}, explicit_key=key)


NESTED = {"b": [1, (2.5, {"y", "x"})], "a": None, 3: {"": b"\xff"}}
MOMENT = datetime(2026, 11, 21, 12, 30, 15, 250, tzinfo=timezone(timedelta(hours=2)))

CALLS: dict[str, Callable[[], Key]] = {
    "nothing": _call(None),
    "int": _call(None, 1),
    "negative": _call(None, -255),
    "huge": _call(None, 10**40),
    "float": _call(None, 1.0),
    "tiny": _call(None, 1e-7),
    "infinite": _call(None, float("-inf")),
    "true": _call(None, True),
    "false": _call(None, False),
    "text": _call(None, "1"),
    "unicode": _call(None, "Zürich 🚲 \0 \ud800"),
    "bytes": _call(None, b"1"),
    "decimal": _call(None, Decimal("1.10")),
    "uuid": _call(None, UUID(int=1)),
    "datetime": _call(None, MOMENT),
    "naive": _call(None, MOMENT.replace(tzinfo=None)),
    "date": _call(None, date(2026, 11, 21)),
    "time": _call(None, time(12, 30)),
    "timedelta": _call(None, timedelta(days=-1, microseconds=5)),
    "list": _call(None, [1, [2, 3]]),
    "set": _call(None, {"b", "a", "c"}),
    "dict": _call(None, {"b": 1, "a": 2}),
    "int-key": _call(None, {1: 1}),
    "text-key": _call(None, {"1": 1}),
    "nested": _call(None, NESTED),
    "enum": _call(None, Colour.RED),
    "dataclass": _call(None, Point(1, 2)),
    "amount": _call(None, 1, 2),
    "rest": _call(None, 1, 2, 3, 4),
    "options": _call(None, 1, region="eu", currency="EUR"),
    "template": _call("order:{order_id}", 42, 999),
    "ambiguous": _call("{order_id}:{amount}", "a:b", "c"),
    "names": _call(("order_id", "region"), 42, region="eu"),
    "callable": _call(lambda order_id, amount: ("order", order_id), 42, amount=999),
    "task-id": _call(TASK_ID, 42),
    "explicit": _with_key("req-7f3a", 42),
    "explicit-parts": _with_key(["acme", "req-7f3a"], 42),
    "explicit-as-template": _with_key("order:42", 42),
    "explicit-as-callable": _with_key(["order", "42"], 42),
    "part": lambda: rule_of(charge).derive((42,), {}).part("a-task-id"),
    "explicit-part": lambda: rule_of(charge).of_text("req-7f3a").part("a-task-id"),
}


def derived() -> dict[str, list[str]]:
    """Returns digest and fingerprint of each call."""
    keys = {name: derive() for name, derive in CALLS.items()}
    return {name: [key.digest, key.fingerprint.hex()] for name, key in keys.items()}


if __name__ == "__main__":
    print(json.dumps(derived()))
