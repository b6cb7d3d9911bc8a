"""A value that cannot be serialized is refused, and its key is completed without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_idempotent import Idempotency, ResultNotStoredError, State
from celery_idempotent.store.run_sync import run_sync
from tests.functions.shop import Calls, Money, Shop

MONEY = "tests.functions.shop.Money"


@pytest.fixture(params=["blocking", "async"])
def calls(request: pytest.FixtureRequest, idem: Idempotency) -> Iterator[Calls]:
    calls = Calls(request.param)
    yield calls
    calls.close(idem)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"total": [Money(1)]}, f"serialize the type {MONEY}, inside a value of type dict"),
        (Money(1), f"serialize the type {MONEY}"),
        ({(1, 2): 3}, "serialize the type tuple as a key, inside a value of type dict"),
        ({"__type__": "nonesuch", "__value__": 1}, "restore the type dict"),
    ],
    ids=["nested", "plain", "key", "not restored"],
)
def test_the_error_names_function_type_serializer_and_remedy(
    shop: Shop, key: str, value: Any, reason: str
) -> None:
    charge = shop.idempotent(lambda order: value)

    with pytest.raises(ResultNotStoredError) as first:
        charge(key)
    with pytest.raises(ResultNotStoredError) as duplicate:
        charge(key)

    message = str(first.value)
    assert message.startswith("shop.charge:")
    assert message.endswith(
        f": idempotency_serializer 'json' cannot {reason}; return plain types, or set another "
        "idempotency_serializer, or idempotency_store_result=False"
    )
    assert message.startswith(str(duplicate.value))
    assert shop.runs == [key]
    assert shop.state(key) is State.COMPLETED


def test_with_store_result_false_any_value_is_returned_as_it_is(shop: Shop, key: str) -> None:
    value = (Money(1), {1, 2})
    charge = shop.idempotent(lambda order: value, store_result=False)

    assert charge(key) is value
    with pytest.raises(ResultNotStoredError, match="idempotency_store_result is off"):
        charge(key)


def test_a_value_that_is_too_large_has_the_types_of_a_smaller_one(shop: Shop, key: str) -> None:
    charge = shop.idempotent(lambda order: (1,) * 100, max_result_size=100)

    assert charge(key) == [1] * 100
    with pytest.raises(ResultNotStoredError, match="idempotency_max_result_size"):
        charge(key)


def test_a_block_with_such_a_value_has_completed(calls: Calls, idem: Idempotency, key: str) -> None:
    for value in ([Money(1)], "of a second execution"):
        with pytest.raises(ResultNotStoredError, match=f"the type {MONEY}, inside a value"):
            calls.complete(idem, key, value)

    record = run_sync(idem.executor.store.get(idem.key_of(key)))
    assert record is not None
    assert record.state is State.COMPLETED


def test_a_block_with_store_result_false_returns_the_value_as_it_is(
    calls: Calls, idem: Idempotency, key: str
) -> None:
    value = (Money(1),)

    assert calls.complete(idem, key, value, store_result=False) is value


def test_a_step_with_such_a_value_has_finished(calls: Calls, idem: Idempotency, key: str) -> None:
    with pytest.raises(ResultNotStoredError) as first:
        calls.step(idem, key, lambda: [Money(1)])
    with pytest.raises(ResultNotStoredError) as again:
        calls.step(idem, key, lambda: "of a second run")

    message = str(first.value)
    assert message.startswith("step 'book' of calls:")
    assert message.endswith(
        f"the type {MONEY}, inside a value of type list; return plain types, or set another "
        "idempotency_serializer"
    )
    assert message.startswith(str(again.value))
