"""Whatever is wrong with one key of a batch is the error of its entry; the others go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest
import redis

from celery_idempotent import (
    CorruptRecordError,
    Decision,
    Idempotency,
    IdempotencyError,
    KeyReusedError,
    KeyRuleError,
    PoisonedTaskError,
    ResultNotStoredError,
)
from celery_idempotent.core.lease.heartbeat import heartbeat
from tests.functions.conftest import Money, Run, decisions
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import raw_record


class Hostile:
    """A key of an application's type, whose methods raise."""

    def __init__(self, method: str) -> None:
        self._method = method

    def _raise(self, method: str) -> None:
        if self._method == method:
            raise RuntimeError("secret")

    def __hash__(self) -> int:
        self._raise("__hash__")
        return 1

    def __eq__(self, other: object) -> bool:
        self._raise("__eq__")
        return self is other

    def __len__(self) -> int:
        self._raise("__len__")
        return 1

    def __repr__(self) -> str:
        raise RuntimeError("secret")


def cyclic() -> tuple[Any, ...]:
    members: list[Any] = []
    members.append(members)
    return ("a", tuple(members))


def nested(depth: int) -> tuple[Any, ...]:
    return (nested(depth - 1),) if depth else (1,)


class Batches:
    """Uses batches, blocking or async; all calls block."""

    def __init__(self, idem: Idempotency, run: Run, kind: str) -> None:
        self.idem = idem
        self._run = run
        self.kind = kind

    def begin(
        self,
        keys: Sequence[Any],
        fingerprints: Sequence[Any] | None = None,
        values: dict[Any, Any] | None = None,
    ) -> tuple[list[Any], dict[Any, IdempotencyError]]:
        """Begins the keys, completes those of `values` and releases the others.

        Returns:
            The entries, and what complete_many returned.
        """
        if self.kind == "blocking":
            with self.idem.begin_many(keys, fingerprints) as batch:
                return list(batch), batch.complete_many(values or {})

        async def use_batch() -> tuple[list[Any], dict[Any, IdempotencyError]]:
            async with await self.idem.abegin_many(keys, fingerprints) as batch:
                return list(batch), await batch.complete_many(values or {})

        entries: tuple[list[Any], dict[Any, IdempotencyError]] = self._run(use_batch())
        return entries


@pytest.fixture(params=["blocking", "async"])
def batches(request: pytest.FixtureRequest, idem: Idempotency, run: Run) -> Batches:
    return Batches(idem, run, request.param)


BAD_KEYS: dict[str, Any] = {
    "None": None,
    "bool": True,
    "None in a tuple": ("secret", None),
    "empty text": "",
    "empty tuple": (),
    "unhashable": ["a", "b"],
    "unhashable within": ("a", ["b"]),
    "mapping": {"a": 1},
    "NaN": float("nan"),
    "object": object(),
    "nested garbage": ("a", ("b", object())),
    "contains itself": cyclic(),
    "too deep": nested(101),
    "hash raises": Hostile("__hash__"),
    "length raises": Hostile("__len__"),
}


@pytest.mark.parametrize("bad", BAD_KEYS)
def test_one_bad_key_sank_a_batch(batches: Batches, key: str, bad: str) -> None:
    keys = [f"{key}:1", BAD_KEYS[bad], f"{key}:2"]

    entries, errors = batches.begin(keys, values={f"{key}:1": 1, f"{key}:2": 2})

    assert decisions(entries) == [Decision.RUN, Decision.REJECTED, Decision.RUN]
    assert isinstance(entries[1].error, KeyRuleError)
    assert "secret" not in str(entries[1].error)
    assert "\n" not in str(entries[1].error)
    assert errors == {}
    entries, _ = batches.begin([keys[0], keys[2]])
    assert [entry.replay for entry in entries] == [1, 2]
    assert not heartbeat.held()


def test_a_derived_key_is_refused(batches: Batches, key: str) -> None:
    derived = batches.idem.key_of(key)

    entries, _ = batches.begin([derived, key])

    assert decisions(entries) == [Decision.REJECTED, Decision.RUN]
    assert "is a Key, and would be hashed to another key" in str(entries[0].error)
    with pytest.raises(KeyRuleError, match="is a Key"):
        batches.idem.execution(derived)


def test_a_lone_surrogate_is_a_key_like_any_other(batches: Batches, key: str) -> None:
    bad = f"{key}:\ud800"

    entries, errors = batches.begin([bad, key], values={bad: 1, key: 2})

    assert decisions(entries) == [Decision.RUN, Decision.RUN]
    assert errors == {}


@pytest.mark.parametrize("bad", [object(), float("nan"), {"a": cyclic()}, Hostile("__len__")])
def test_a_bad_fingerprint_is_the_error_of_its_entry(batches: Batches, key: str, bad: Any) -> None:
    entries, _ = batches.begin([f"{key}:1", f"{key}:2"], [bad, "body"])

    assert decisions(entries) == [Decision.REJECTED, Decision.RUN]
    assert isinstance(entries[0].error, KeyRuleError)
    assert str(entries[0].error).startswith("calls: the fingerprint ")


@pytest.mark.parametrize("fingerprints", [[], ["one"], ["one", "two", "three"]])
def test_a_wrong_number_of_fingerprints_is_the_error_of_the_call(
    batches: Batches, key: str, fingerprints: list[str]
) -> None:
    with pytest.raises(ValueError, match="2 keys need as many fingerprints, not"):
        batches.begin([f"{key}:1", f"{key}:2"], fingerprints)

    entries, _ = batches.begin([f"{key}:1", f"{key}:2"])
    assert decisions(entries) == [Decision.RUN] * 2


def test_duplicates_are_those_of_a_derived_key(batches: Batches, key: str) -> None:
    entries, _ = batches.begin([key, 7, "7", key, None, None])

    assert decisions(entries) == [
        Decision.RUN,
        Decision.RUN,
        Decision.DUPLICATE,
        Decision.DUPLICATE,
        Decision.REJECTED,
        Decision.REJECTED,
    ]


def test_equal_keys_of_different_types_are_not_begun_under_one_name(batches: Batches) -> None:
    """``1 == 1.0``, so complete_many could not tell them apart, but their records differ."""
    number = uuid4().int >> 100

    entries, errors = batches.begin([number, float(number)], values={number: "value"})

    assert decisions(entries) == [Decision.RUN, Decision.REJECTED]
    assert "of another type" in str(entries[1].error)
    assert errors == {}
    assert not heartbeat.held()


def test_a_bad_record_is_the_error_of_its_entry(
    batches: Batches, client: redis.Redis, key: str
) -> None:
    store = batches.idem.executor.store
    damaged, newer, hash_, reused, good = keys = [f"{key}:{n}" for n in range(5)]
    client.set(store.name(batches.idem.key_of(damaged)), b"S cut short", ex=60)
    client.set(store.name(batches.idem.key_of(newer)), raw_record(b"Z"), ex=60)
    client.hset(store.name(batches.idem.key_of(hash_)), "field", "value")
    batches.begin([reused], ["one"], values={reused: 1})

    entries, errors = batches.begin(keys, ["two"] * 5, values={good: "value"})

    assert decisions(entries) == [Decision.REJECTED] * 4 + [Decision.RUN]
    assert [type(entry.error) for entry in entries] == [
        CorruptRecordError,
        CorruptRecordError,
        CorruptRecordError,
        KeyReusedError,
        type(None),
    ]
    assert errors == {}


def test_a_poisoned_key_is_the_error_of_its_entry(
    batches: Batches, client: redis.Redis, key: str
) -> None:
    poisoned = batches.idem.key_of(f"{key}:poisoned")
    record = raw_record(b"E", attempt=6, fingerprint=b"", owner=b"", body=b"poisoned")
    client.set(batches.idem.executor.store.name(poisoned), record, ex=60)

    entries, _ = batches.begin([f"{key}:poisoned", key])

    assert decisions(entries) == [Decision.REJECTED, Decision.RUN]
    assert isinstance(entries[0].error, PoisonedTaskError)
    assert "has begun 5 times" in str(entries[0].error)


def test_a_value_that_is_not_stored_is_the_error_of_its_entry(
    server: RedisServer, run: Run, batches: Batches, key: str
) -> None:
    small = Idempotency(server.url, key_prefix=key, max_result_size=100)
    batches = Batches(small, run, batches.kind)
    keys = ["money", "nested", "not restored", "large", "good"]
    values: list[Any] = [Money(1), {"a": [Money(1)]}, {(1, 2): 3}, "x" * 100, (1, 2)]

    entries, errors = batches.begin(keys, values=dict(zip(keys, values, strict=True)))

    assert list(errors) == keys[:-1]
    assert all(isinstance(error, ResultNotStoredError) for error in errors.values())
    assert [entry.error for entry in entries] == [*errors.values(), None]
    assert "Money, inside a value of type dict; return plain types" in str(errors["nested"])
    assert "larger than idempotency_max_result_size" in str(errors["large"])
    again, _ = batches.begin(keys)
    assert decisions(again) == [Decision.REPLAY] * 5
    assert again[-1].replay == [1, 2]
    for entry in again[:-1]:
        with pytest.raises(ResultNotStoredError):
            _ = entry.replay
    run(small.aclose())
    small.close()
