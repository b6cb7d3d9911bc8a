"""The first caller gets a value that is equal to that of every duplicate, in all its types.

A value that cannot be serialized is refused, and its key is completed without it.
"""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import Celery
from cryptography.fernet import Fernet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from celery_idempotent import Decision, Idempotency, ResultNotStoredError, State
from celery_idempotent.extensions.offload import OffloadStorage
from tests.conftest import exhaustive_except
from tests.functions.conftest import Calls, Money, Point, same
from tests.servers.redis_server import RedisServer
from tests.unit.payload.encoding import SERIALIZERS


@pytest.mark.parametrize(
    ("value", "restored"),
    [
        ((1, (2, 3)), [1, [2, 3]]),
        ({1: 2, None: 3}, {"1": 2, "null": 3}),
        (Point(1, 2), [1, 2]),
        ([date(2026, 11, 22), Decimal("1.10"), UUID(int=7), b"\xff"], None),
        ("\ud83d\ude00", "\N{GRINNING FACE}"),
        (1.5, None),
        ("text", None),
    ],
    ids=repr,
)
def test_the_value_is_what_is_restored(calls: Calls, key: str, value: Any, restored: Any) -> None:
    charge = calls.function(lambda order: value)

    for result in (charge(key), charge(key)):
        assert same(result, value if restored is None else restored)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.decimals()
    | st.uuids()
    | st.dates()
    | st.datetimes()
    | st.builds(Money, st.integers())
    | st.builds(Point, st.integers(), st.integers())
)
KEYS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda values: (
        st.lists(values)
        | st.tuples(values, values)
        | st.dictionaries(KEYS | st.tuples(KEYS, KEYS), values)
        | st.sets(KEYS)
        | st.just({"__type__": "nonesuch", "__value__": 1})
    ),
    max_leaves=10,
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", exhaustive_except(["blocking", "async"], "blocking"))
@pytest.mark.parametrize("serializer", SERIALIZERS)
def test_any_value_is_equal_or_refused(server: RedisServer, serializer: str, kind: str) -> None:
    idem = Idempotency(server.url, key_prefix=uuid4().hex, serializer=serializer)
    calls = Calls(kind, idem)
    returned: Any = None
    equal = refused = 0
    charge = calls.function(lambda order: returned)

    @settings(
        max_examples=150,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(VALUES)
    def check(value: Any) -> None:
        nonlocal returned, equal, refused
        returned, order = value, uuid4().hex
        try:
            first = charge(order)
        except ResultNotStoredError:
            returned = "of a second execution"
            with pytest.raises(ResultNotStoredError, match=f"serializer '{serializer}' cannot"):
                charge(order)
            refused += 1
        else:
            returned = "of a second execution"
            assert same(first, charge(order))
            equal += 1

    try:
        check()
    finally:
        calls.close()
    print(f"\n{serializer}, {kind}: {equal} equal, {refused} refused")
    assert equal > 20
    assert (refused > 0) is (serializer != "pickle")


@pytest.mark.parametrize("kind", ["blocking", "async"])
@pytest.mark.parametrize("storage", ["compressed", "encrypted", "offloaded", "all"])
def test_a_stored_value_is_restored_without_reading_it_back(
    server: RedisServer,
    client: Redis,
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    storage: str,
    kind: str,
) -> None:
    options: dict[str, Any] = {"compression": "gzip"}
    if storage in ("encrypted", "all"):
        options["encryption_keys"] = (Fernet.generate_key(),)
    if storage in ("offloaded", "all"):
        options |= {"offload_backend": f"file://{tmp_path}", "max_result_size": 20}
    app = Celery("shop", backend=server.url, set_as_current=False)
    calls = Calls(kind, Idempotency(app, key_prefix=key, **options))
    charge = calls.function(lambda order: ({1: order}, (2, 3)))
    reads: list[str] = []
    get = OffloadStorage.get

    def count_reads(self: OffloadStorage, name: str) -> bytes | None:
        reads.append(name)
        return get(self, name)

    monkeypatch.setattr(OffloadStorage, "get", count_reads)

    order = "x" * 2000
    first = charge(order)
    assert reads == []
    duplicate = charge(order)

    assert same(first, duplicate)
    assert first == [{"1": order}, [2, 3]]
    assert len(reads) == len(list(tmp_path.iterdir())) == (storage in ("offloaded", "all"))
    (name,) = client.scan_iter(f"{key}:*")
    assert (b"!json" in (client.get(name) or b"")) == (storage in ("encrypted", "all"))
    calls.close()


def test_restoring_takes_no_round_trip(calls: Calls, client: Redis, key: str) -> None:
    charge = calls.function(lambda order: (1, 2))
    charge("warm")

    def executed() -> int:
        stats: Any = client.info("commandstats")
        return int(stats["cmdstat_evalsha"]["calls"])

    before = executed()
    charge(key)

    assert executed() - before == 2


def test_the_first_caller_cannot_change_what_is_stored(calls: Calls, key: str) -> None:
    owned: list[Any] = [1, 2]
    charge = calls.function(lambda order: {"items": owned})

    first = charge(key)
    first["items"].append("the caller's")
    owned.append("the function's")

    assert charge(key) == {"items": [1, 2]}


def test_complete_returns_what_a_replay_returns(calls: Calls, key: str) -> None:
    first = calls.complete(key, (1, {2: 3}))
    replayed = calls.complete(key, "of a second execution")

    assert same(first, replayed)
    assert first == [1, {"2": 3}]


class TestWithoutProtection:
    """A call without a record returns the same types as one with a record."""

    @pytest.fixture(params=["disabled", "store away"])
    def idem(self, request: pytest.FixtureRequest) -> Idempotency:
        """An engine whose calls have no record."""
        how = {"disabled": {"enabled": False}, "store away": {"on_store_error": "run"}}
        return Idempotency("redis://127.0.0.1:1", redis_timeout=0.2, **how[request.param])

    def test_values_are_what_the_serializer_makes_of_them(self, calls: Calls) -> None:
        value, restored = (1, {2: 3}), [1, {"2": 3}]

        assert same(calls.function(lambda order: value)("1"), restored)
        assert same(calls.complete("1", value), restored)
        assert same(calls.step("1", lambda: value), restored)

    def test_a_value_that_cannot_be_serialized_is_refused(self, calls: Calls) -> None:
        with pytest.raises(ResultNotStoredError, match=r"^shop\.charge.*conftest\.Money, inside"):
            calls.function(lambda order: [Money(1)])("1")
        with pytest.raises(ResultNotStoredError, match=r"^step 'book' of calls:"):
            calls.step("1", lambda: Money(1))

    def test_an_error_is_raised_as_it_is(self, calls: Calls) -> None:
        error = LookupError("no such order")

        def charge(order: str) -> None:
            raise error

        with pytest.raises(LookupError) as caught:
            calls.function(charge)("1")
        assert caught.value is error

    def test_with_store_result_false_it_is_returned_as_it_is(self, calls: Calls) -> None:
        value = (Money(1),)

        assert calls.function(lambda order: value, store_result=False)("1") is value

    def test_a_batch_runs_its_keys_each_time(self, idem: Idempotency) -> None:
        for _ in range(2):
            with idem.begin_many(["1", "2"]) as batch:
                assert [entry.decision for entry in batch] == [Decision.RUN] * 2
                assert batch.complete_many() == {}


class Interrupted:
    """The first time that it is serialized, a signal handler raises an error."""

    def __init__(self) -> None:
        self.times = 0

    def __json__(self) -> int:
        self.times += 1
        if self.times == 1:
            raise InterruptedError
        return 7


def test_the_error_of_a_signal_handler_does_not_lose_the_value(calls: Calls, key: str) -> None:
    charge = calls.function(lambda order: Interrupted())

    assert [charge(key), charge(key)] == [7, 7]
    assert len(calls.runs) == 1


MONEY = "tests.functions.conftest.Money"


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
def test_the_error_names_type_and_remedy(calls: Calls, key: str, value: Any, reason: str) -> None:
    charge = calls.function(lambda order: value)

    with pytest.raises(ResultNotStoredError) as first:
        charge(key)
    with pytest.raises(ResultNotStoredError) as duplicate:
        charge(key)

    message = str(first.value)
    assert message.startswith("shop.charge:")
    assert message.endswith(
        f": idempotency_serializer 'json' cannot {reason}; return plain types, or set another "
        "serializer, or idempotency_store_result=False"
    )
    assert message.startswith(str(duplicate.value))
    assert calls.runs == [key]
    assert calls.states() == [State.COMPLETED]


def test_with_store_result_false_any_value_is_returned_as_it_is(calls: Calls, key: str) -> None:
    value = (Money(1), {1, 2})
    charge = calls.function(lambda order: value, store_result=False)

    assert charge(key) is value
    with pytest.raises(ResultNotStoredError, match="idempotency_store_result is off"):
        charge(key)
    assert calls.complete(key, value, store_result=False) is value


def test_a_value_that_is_too_large_has_the_types_of_a_smaller_one(calls: Calls, key: str) -> None:
    values = [(1,) * 100, "of a second run"]
    charge = calls.function(lambda order: values[len(calls.runs) - 1], max_result_size=100)

    def step(_: str) -> Any:
        return calls.step(key, lambda: values.pop(0), max_result_size=100)

    for call in (charge, step):
        assert call(key) == [1] * 100
        with pytest.raises(ResultNotStoredError, match="larger than idempotency_max_result_size"):
            call(key)


def test_a_block_with_such_a_value_has_completed(calls: Calls, key: str) -> None:
    for value in ([Money(1)], "of a second execution"):
        with pytest.raises(ResultNotStoredError, match=f"the type {MONEY}, inside a value"):
            calls.complete(key, value)

    assert calls.states() == [State.COMPLETED]


def test_a_step_with_such_a_value_has_finished(calls: Calls, key: str) -> None:
    with pytest.raises(ResultNotStoredError) as first:
        calls.step(key, lambda: [Money(1)])
    with pytest.raises(ResultNotStoredError) as again:
        calls.step(key, lambda: "of a second run")

    message = str(first.value)
    assert message.startswith("step 'book' of calls:")
    assert message.endswith(
        f"the type {MONEY}, inside a value of type list; return plain types, or set another "
        "serializer"
    )
    assert message.startswith(str(again.value))
