"""Duplicates that wait for a running call are woken when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import pack

#: The longest time in seconds between an end and its effect; the fallback is 45 s at least.
AT_ONCE = 0.9


def test_a_duplicate_gets_the_result_at_once(ledger: Ledger, order: str) -> None:
    first = ledger.start(pack, order)
    duplicates = [ledger.duplicate(pack, order) for _ in range(3)]
    since = time.monotonic()
    ledger.release(order)
    values = [each.get(timeout=SOON) for each in (first, *duplicates)]
    assert time.monotonic() - since < AT_ONCE
    assert values == [values[0]] * 4
    assert [len(ledger.signals(each.id, "conflicted")) for each in duplicates] == [1] * 3
