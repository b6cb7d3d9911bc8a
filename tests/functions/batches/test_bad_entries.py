"""Whatever is wrong with one key of a batch is the error of its entry; the others go on."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from redis import Redis

from celery_idempotent import Decision, Idempotency, PoisonedTaskError, ResultNotStoredError
from celery_idempotent.core.lease.heartbeat import heartbeat
from celery_idempotent.errors import CorruptRecordError, KeyReusedError, KeyRuleError
from tests.functions.conftest import Calls, Money, decisions
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
def test_one_bad_key_sank_a_batch(calls: Calls, key: str, bad: str) -> None:
    keys = [f"{key}:1", BAD_KEYS[bad], f"{key}:2"]

    entries, errors = calls.use_batch(keys, values={f"{key}:1": 1, f"{key}:2": 2})

    assert decisions(entries) == [Decision.RUN, Decision.REJECTED, Decision.RUN]
    assert isinstance(entries[1].error, KeyRuleError)
    assert "secret" not in str(entries[1].error)
    assert "\n" not in str(entries[1].error)
    assert errors == {}
    entries, _ = calls.use_batch([keys[0], keys[2]])
    assert [entry.replay for entry in entries] == [1, 2]
    assert not heartbeat.leases()


def test_a_derived_key_is_refused(calls: Calls, key: str) -> None:
    derived = calls.idem.key_of(key)

    entries, _ = calls.use_batch([derived, key])

    assert decisions(entries) == [Decision.REJECTED, Decision.RUN]
    assert "is a Key, and would be hashed to another key" in str(entries[0].error)
    with pytest.raises(KeyRuleError, match="is a Key"):
        calls.idem.execution(derived)


def test_a_lone_surrogate_is_a_key_like_any_other(calls: Calls, key: str) -> None:
    bad = f"{key}:\ud800"

    entries, errors = calls.use_batch([bad, key], values={bad: 1, key: 2})

    assert decisions(entries) == [Decision.RUN, Decision.RUN]
    assert errors == {}


@pytest.mark.parametrize("bad", [object(), float("nan"), {"a": cyclic()}, Hostile("__len__")])
def test_a_bad_fingerprint_is_the_error_of_its_entry(calls: Calls, key: str, bad: Any) -> None:
    entries, _ = calls.use_batch([f"{key}:1", f"{key}:2"], [bad, "body"])

    assert decisions(entries) == [Decision.REJECTED, Decision.RUN]
    assert isinstance(entries[0].error, KeyRuleError)
    assert str(entries[0].error).startswith("calls: the fingerprint ")


@pytest.mark.parametrize("fingerprints", [[], ["one"], ["one", "two", "three"]])
def test_a_wrong_number_is_the_error_of_the_call(calls: Calls, key: str, fingerprints: Any) -> None:
    with pytest.raises(ValueError, match="2 keys need as many fingerprints, not"):
        calls.use_batch([f"{key}:1", f"{key}:2"], fingerprints)

    entries, _ = calls.use_batch([f"{key}:1", f"{key}:2"])
    assert decisions(entries) == [Decision.RUN] * 2


def test_duplicates_are_those_of_a_derived_key(calls: Calls, key: str) -> None:
    entries, _ = calls.use_batch([key, 7, "7", key, None, None])

    for number, decision in enumerate((Decision.RUN, Decision.DUPLICATE, Decision.REJECTED)):
        assert decisions(entries)[2 * number : 2 * number + 2] == [decision] * 2


def test_equal_keys_of_different_types_are_not_begun_under_one_name(calls: Calls) -> None:
    """``1 == 1.0``, so complete_many could not tell them apart, but their records differ."""
    number = uuid4().int >> 100

    entries, errors = calls.use_batch([number, float(number)], values={number: "value"})

    assert decisions(entries) == [Decision.RUN, Decision.REJECTED]
    assert "of another type" in str(entries[1].error)
    assert errors == {}
    assert not heartbeat.leases()


def test_a_bad_record_is_the_error_of_its_entry(calls: Calls, client: Redis, key: str) -> None:
    store = calls.idem.executor.store
    damaged, newer, hash_, reused, good = keys = [f"{key}:{n}" for n in range(5)]
    client.set(store.name(calls.idem.key_of(damaged)), b"S cut short", ex=60)
    client.set(store.name(calls.idem.key_of(newer)), raw_record(b"Z"), ex=60)
    client.hset(store.name(calls.idem.key_of(hash_)), "field", "value")
    calls.use_batch([reused], ["one"], values={reused: 1})

    entries, errors = calls.use_batch(keys, ["two"] * 5, values={good: "value"})

    assert decisions(entries) == [Decision.REJECTED] * 4 + [Decision.RUN]
    errors_found = [type(entry.error) for entry in entries]
    assert errors_found == [*[CorruptRecordError] * 3, KeyReusedError, type(None)]
    assert errors == {}


def test_a_poisoned_key_is_the_error_of_its_entry(calls: Calls, client: Redis, key: str) -> None:
    poisoned = calls.idem.key_of(f"{key}:poisoned")
    record = raw_record(b"E", attempt=6, fingerprint=b"", owner=b"", body=b"poisoned")
    client.set(calls.idem.executor.store.name(poisoned), record, ex=60)

    entries, _ = calls.use_batch([f"{key}:poisoned", key])

    assert decisions(entries) == [Decision.REJECTED, Decision.RUN]
    assert isinstance(entries[0].error, PoisonedTaskError)
    assert "has begun 5 times" in str(entries[0].error)


def test_a_bad_value_is_the_error_of_its_entry(server: RedisServer, calls: Calls, key: str) -> None:
    calls.idem = Idempotency(server.url, key_prefix=key, max_result_size=100)
    keys = ["money", "nested", "not restored", "large", "good"]
    values: list[Any] = [Money(1), {"a": [Money(1)]}, {(1, 2): 3}, "x" * 100, (1, 2)]

    entries, errors = calls.use_batch(keys, values=dict(zip(keys, values, strict=True)))

    assert list(errors) == keys[:-1]
    assert all(isinstance(error, ResultNotStoredError) for error in errors.values())
    assert [entry.error for entry in entries] == [*errors.values(), None]
    assert "Money, inside a value of type dict; return plain types" in str(errors["nested"])
    assert "larger than idempotency_max_result_size" in str(errors["large"])
    again, _ = calls.use_batch(keys)
    assert decisions(again) == [Decision.REPLAY] * 5
    assert again[-1].replay == [1, 2]
    for entry in again[:-1]:
        with pytest.raises(ResultNotStoredError):
            _ = entry.replay
    calls.close()
