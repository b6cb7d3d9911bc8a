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


def test_keys_equal_those_of_earlier_releases() -> None:
    assert derived() == GOLDEN


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", ["1", "2"])
def test_keys_equal_those_of_other_processes(seed: str) -> None:
    command = [sys.executable, "-m", "tests.unit.key.test_golden"]
    environment = {**os.environ, "PYTHONHASHSEED": seed}

    printed = subprocess.check_output(command, env=environment, cwd=REPOSITORY)

    assert json.loads(printed) == GOLDEN


def test_golden_keys_are_distinct() -> None:
    assert len({digest for digest, _ in GOLDEN.values()}) == len(GOLDEN)


class Colour(Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: int


def charge(order_id: Any = None, amount: Any = 0, *rest: Any, **options: Any) -> None: ...


def by_order(order_id: int, amount: int) -> Any:
    return "order", order_id


def _call(key: Any, *args: Any, **kwargs: Any) -> Callable[[], Key]:
    return lambda: rule_of(charge, key).derive(args, kwargs, task_id="a-task-id")


def _with_key(key: str | list[str], *args: Any) -> Callable[[], Key]:
    return lambda: rule_of(charge).derive(args, {}, explicit_key=key)


NESTED = {"b": [1, (2.5, {"y", "x"})], "a": None, 3: {"": b"\xff"}}
MOMENT = datetime(2026, 11, 21, 12, 30, 15, 250, tzinfo=timezone(timedelta(hours=2)))

#: Fingerprints of the call (42) whose key leaves it open, and of (42, 999).
OF_42, OF_999 = "98c9e0e21d25ae0b", "f186ea640c2f5d63"
#: Call, digest of its key, fingerprint. To change one on purpose, increase `canonical.VERSION`.
CALLS: dict[str, tuple[Callable[[], Key], str, str]] = {
    "nothing": (_call(None), "zSxJeGQ-6OUoRCdGtduELQ", ""),
    "int": (_call(None, 1), "PN0MlSPt3FmEwTzQ5dHvBQ", ""),
    "negative": (_call(None, -255), "3pYnfwezj11q07jyKJWlhw", ""),
    "huge": (_call(None, 10**40), "d7UW1xdqTakpYjIDUH9dlA", ""),
    "float": (_call(None, 1.0), "fEekJQnG14CSnickNLGn8A", ""),
    "tiny": (_call(None, 1e-7), "aaU6d6_lg8vUy3wogar83Q", ""),
    "infinite": (_call(None, float("-inf")), "tQpS1RKZu3E111fumT8FPA", ""),
    "true": (_call(None, True), "GyRlJoJGoHmkQ6roe3fC5Q", ""),
    "false": (_call(None, False), "kPOTtb3BOYPOI-7u44BE3w", ""),
    "text": (_call(None, "1"), "CL5jz7J6Fk7Py12f4a0mPA", ""),
    "unicode": (_call(None, "Zürich 🚲 \0 \ud800"), "3dvocc-NTWdiDGYfEDPrcQ", ""),
    "bytes": (_call(None, b"1"), "RJpfOhjROr5SrLBYNZqj5w", ""),
    "decimal": (_call(None, Decimal("1.10")), "pA0HKdxR0FD4u9qEctlj4A", ""),
    "uuid": (_call(None, UUID(int=1)), "036trCsbkuT0ZB2poqnm_A", ""),
    "datetime": (_call(None, MOMENT), "lnXxREE-HdvMv3DcYxSE5g", ""),
    "naive": (_call(None, MOMENT.replace(tzinfo=None)), "13uusW4rvXSfYhXmDKmz8g", ""),
    "date": (_call(None, date(2026, 11, 21)), "U1U3LSQVmF7EgURuxH4fMQ", ""),
    "time": (_call(None, time(12, 30)), "iVtQz0MOlvGGOxdJh7-u1g", ""),
    "timedelta": (_call(None, timedelta(days=-1, microseconds=5)), "6-ECp2Tnk8-spHl65MCS-Q", ""),
    "list": (_call(None, [1, [2, 3]]), "hRk5aJHon12isifPuMS1_Q", ""),
    "set": (_call(None, {"b", "a", "c"}), "s7FPX4vgNzVXHRfWjKpQcA", ""),
    "dict": (_call(None, {"b": 1, "a": 2}), "pHQ7KkCU9dgxkfUz6E9HmA", ""),
    "int-key": (_call(None, {1: 1}), "ppVIURp99_Le7D7zlZjPGA", ""),
    "text-key": (_call(None, {"1": 1}), "iMgsfGtPxFwbWQ7ZZPcTdQ", ""),
    "nested": (_call(None, NESTED), "kfCjyfVSFEL67eFUpRAkdg", ""),
    "enum": (_call(None, Colour.RED), "otRWx4Yv-PgMNYbRpNyNqg", ""),
    "dataclass": (_call(None, Point(1, 2)), "Pk5HgFrPs943TNufY3N6Sg", ""),
    "amount": (_call(None, 1, 2), "qtp6zn_JBwug5dNiBFfY1w", ""),
    "rest": (_call(None, 1, 2, 3, 4), "1qeLDRVyOwfy7uSQ6rBHlQ", ""),
    "options": (_call(None, 1, region="eu", currency="EUR"), "Ly2LYau2IcT9EvxMskLhRA", ""),
    "template": (_call("order:{order_id}", 42, 999), "7kg_0tKNXAA4cslJGHuxoQ", OF_999),
    "ambiguous": (
        _call("{order_id}:{amount}", "a:b", "c"),
        "eNlRM0KnhXhWyvL1-QcwAg",
        "e8d5cbe07c6469c4",
    ),
    "names": (
        _call(("order_id", "region"), 42, region="eu"),
        "FoFRMDAyan9NcSh8XnP6AQ",
        "8a42ba7e8fde0e6b",
    ),
    "callable": (_call(by_order, 42, amount=999), "-un60Ank7eK-BKCNunkkjg", OF_999),
    "task-id": (_call(TASK_ID, 42), "eS0djGFC_OfwI1IzKnvGmg", ""),
    # Changed on purpose, before the first release: keys that callers bring got a namespace of
    # their own. Until then "explicit" had the digest ct55-0LsqxVlt3N1bAsukg.
    "explicit": (_with_key("req-7f3a", 42), "~XUu_BHoPn0pnw_7WY52VtA", OF_42),
    "explicit-parts": (_with_key(["acme", "req-7f3a"], 42), "~ERPgOQ_xgOSBElJJX-dZrw", OF_42),
    "explicit-as-template": (_with_key("order:42", 42), "~FqLDu23rViKkWk2l9zMu2Q", OF_42),
    "explicit-as-callable": (_with_key(["order", "42"], 42), "~Tbmv65R0Q1rgpd55aQEcJw", OF_42),
    "part": (lambda: _call(None, 42)().part("a-task-id"), "y9whYDKBS1AKg6XUUvz3Jw", ""),
    "explicit-part": (
        lambda: _with_key("req-7f3a", 42)().part("a-task-id"),
        "~XwJKld3iYCsuAZTBJEVuhw",
        "",
    ),
}
GOLDEN = {name: [digest, fingerprint] for name, (_, digest, fingerprint) in CALLS.items()}


def derived() -> dict[str, list[str]]:
    """Returns digest and fingerprint of each call."""
    keys = {name: derive() for name, (derive, *_) in CALLS.items()}
    return {name: [key.digest, key.fingerprint.hex()] for name, key in keys.items()}


if __name__ == "__main__":
    print(json.dumps(derived()))
