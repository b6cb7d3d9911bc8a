"""Golden keys: the same in every release, process, platform and Python version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from celery_idempotent import TASK_ID
from celery_idempotent.core.key import Key
from tests.unit.conftest import rule_of

pytestmark = pytest.mark.core

REPOSITORY = Path(__file__).parents[3]

#: Call, digest of its key, fingerprint. To change one on purpose, increase `canonical.VERSION`.
GOLDEN = {
    "nothing": ["zSxJeGQ-6OUoRCdGtduELQ", ""],
    "int": ["PN0MlSPt3FmEwTzQ5dHvBQ", ""],
    "negative": ["3pYnfwezj11q07jyKJWlhw", ""],
    "huge": ["d7UW1xdqTakpYjIDUH9dlA", ""],
    "float": ["fEekJQnG14CSnickNLGn8A", ""],
    "tiny": ["aaU6d6_lg8vUy3wogar83Q", ""],
    "infinite": ["tQpS1RKZu3E111fumT8FPA", ""],
    "true": ["GyRlJoJGoHmkQ6roe3fC5Q", ""],
    "false": ["kPOTtb3BOYPOI-7u44BE3w", ""],
    "text": ["CL5jz7J6Fk7Py12f4a0mPA", ""],
    "unicode": ["3dvocc-NTWdiDGYfEDPrcQ", ""],
    "bytes": ["RJpfOhjROr5SrLBYNZqj5w", ""],
    "decimal": ["pA0HKdxR0FD4u9qEctlj4A", ""],
    "uuid": ["036trCsbkuT0ZB2poqnm_A", ""],
    "datetime": ["lnXxREE-HdvMv3DcYxSE5g", ""],
    "naive": ["13uusW4rvXSfYhXmDKmz8g", ""],
    "date": ["U1U3LSQVmF7EgURuxH4fMQ", ""],
    "time": ["iVtQz0MOlvGGOxdJh7-u1g", ""],
    "timedelta": ["6-ECp2Tnk8-spHl65MCS-Q", ""],
    "list": ["hRk5aJHon12isifPuMS1_Q", ""],
    "set": ["s7FPX4vgNzVXHRfWjKpQcA", ""],
    "dict": ["pHQ7KkCU9dgxkfUz6E9HmA", ""],
    "int-key": ["ppVIURp99_Le7D7zlZjPGA", ""],
    "text-key": ["iMgsfGtPxFwbWQ7ZZPcTdQ", ""],
    "nested": ["kfCjyfVSFEL67eFUpRAkdg", ""],
    "enum": ["otRWx4Yv-PgMNYbRpNyNqg", ""],
    "dataclass": ["Pk5HgFrPs943TNufY3N6Sg", ""],
    "amount": ["qtp6zn_JBwug5dNiBFfY1w", ""],
    "rest": ["1qeLDRVyOwfy7uSQ6rBHlQ", ""],
    "options": ["Ly2LYau2IcT9EvxMskLhRA", ""],
    "template": ["7kg_0tKNXAA4cslJGHuxoQ", "f186ea640c2f5d63"],
    "ambiguous": ["eNlRM0KnhXhWyvL1-QcwAg", "e8d5cbe07c6469c4"],
    "names": ["FoFRMDAyan9NcSh8XnP6AQ", "8a42ba7e8fde0e6b"],
    "callable": ["-un60Ank7eK-BKCNunkkjg", "f186ea640c2f5d63"],
    "task-id": ["eS0djGFC_OfwI1IzKnvGmg", ""],
    # Changed on purpose, before the first release: keys that callers bring got a namespace of
    # their own. Until then "explicit" had the digest ct55-0LsqxVlt3N1bAsukg.
    "explicit": ["~XUu_BHoPn0pnw_7WY52VtA", "98c9e0e21d25ae0b"],
    "explicit-parts": ["~ERPgOQ_xgOSBElJJX-dZrw", "98c9e0e21d25ae0b"],
    "explicit-as-template": ["~FqLDu23rViKkWk2l9zMu2Q", "98c9e0e21d25ae0b"],
    "explicit-as-callable": ["~Tbmv65R0Q1rgpd55aQEcJw", "98c9e0e21d25ae0b"],
    "part": ["y9whYDKBS1AKg6XUUvz3Jw", ""],
    "explicit-part": ["~XwJKld3iYCsuAZTBJEVuhw", ""],
}


def test_keys_equal_those_of_earlier_releases() -> None:
    assert derived() == GOLDEN


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", ["1", "2"])
def test_keys_equal_those_of_other_processes(seed: str) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "tests.unit.key.test_golden"],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(printed.stdout) == GOLDEN


def test_golden_keys_are_distinct() -> None:
    assert len({digest for digest, _ in GOLDEN.values()}) == len(GOLDEN)


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
