"""The delay of a message that is put back: a duplicate, and one without a store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_idempotent.core.flow import flow
from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.conflict import POLICIES, held, put_back_delay
from celery_idempotent.core.flow.host import CallData
from celery_idempotent.core.flow.values import PutBack
from celery_idempotent.core.key import Key
from celery_idempotent.core.record import Record, State
from celery_idempotent.core.store.node import OutageLogger
from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.settings import _VALIDATORS, Settings


def delays(put_back_count: int, lease: float) -> list[float]:
    return [put_back_delay(put_back_count, lease) for _ in range(200)]


@pytest.mark.parametrize(
    ("count", "lease", "longest"),
    [
        *((count, 60, 2**count) for count in range(6)),
        *((count, 60, 60) for count in (6, 7, 10_000_000)),
        (9, 0.5, 1),  # at least a second
    ],
)
def test_a_second_then_twice_that_up_to_one_lease(count: int, lease: float, longest: float) -> None:
    several = delays(count, lease)

    assert max(several) <= longest
    assert min(several) >= 0.75 * longest


def test_up_to_a_quarter_is_left_to_chance() -> None:
    several = delays(3, lease=60)

    assert max(several) > 7.8
    assert min(several) < 6.2
    assert len(set(several)) > 100


def test_the_policies_are_those_of_the_option() -> None:
    assert _VALIDATORS["on_conflict"][1] == "one of " + ", ".join(map(repr, POLICIES))


def test_a_copy_is_not_held_by_itself() -> None:
    call: Any = SimpleNamespace(key="shop.charge:digest", task_id="1")

    for holder, text in (("2", "task 2"), ("1", "another copy of this message")):
        record = Record(State.STARTED, call.key, "shop.charge", holder, "w/1", 1, 1)
        assert str(held(call, record)) == f"shop.charge:digest is held by {text} on w/1"


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        (Settings(lease=7200.0), 30),  # not much after the store is there again
        (Settings(lease=60.0, result_ttl=4.0), 2),  # while the outcome is kept
    ],
)
def test_not_for_long_without_a_store(settings: Settings, longest: float) -> None:
    key = Key("shop.charge", "digest")
    data = CallData(None, key, settings, "1", "here/1", 1.0, put_back_count=20)
    nothing: Any = None
    runtime: Any = SimpleNamespace(
        store=SimpleNamespace(node_of=lambda _: SimpleNamespace(outage=OutageLogger("shop")))
    )
    call = Call(data, nothing, runtime, nothing)

    end = flow.without_store(call, StoreUnavailableError("away"))

    assert isinstance(end, PutBack)
    assert 0.75 * min(longest, 30) <= end.seconds <= longest
