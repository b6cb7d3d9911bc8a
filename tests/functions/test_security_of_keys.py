"""The claims of docs/security.md, "Security of keys": what a key protects, and what it does not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import redis

from celery_idempotent import ConflictError, Decision, Idempotency, KeyReusedError, KeyRuleError
from celery_idempotent.core.key import Key
from celery_idempotent.core.task.message.message_headers import MessageHeaders
from celery_idempotent.core.task.publish import put_back
from tests.servers.redis_server import RedisServer

#: A key that a caller brings, and data that must not appear anywhere either.
CARD, CUSTOMER = "4111-1111-1111-1111", "Ada Lovelace"


def names_of(client: redis.Redis, prefix: str) -> list[bytes]:
    names: list[bytes] = list(client.scan_iter(f"{prefix}:*"))
    return names


def test_a_replay_skips_a_permission_check_in_the_body(idem: Idempotency, key: str) -> None:
    allowed = True

    @idem.idempotent(name="shop.receipt")
    def receipt(order: str) -> str:
        if not allowed:
            raise PermissionError
        return "the receipt"

    receipt(key)
    allowed = False

    assert receipt(key) == "the receipt"
    with pytest.raises(PermissionError):
        receipt("another order")


def test_a_guessed_key_with_other_arguments_reveals_no_outcome(idem: Idempotency, key: str) -> None:
    charge = idem.idempotent(name="shop.charge", key="{order}")(lambda order, amount: CUSTOMER)
    charge(key, 999)

    with pytest.raises(KeyReusedError) as caught:
        charge(key, 1)
    assert CUSTOMER not in str(caught.value)
    assert charge(key, 999) == CUSTOMER


def test_the_first_begin_of_a_key_decides_its_arguments(idem: Idempotency, key: str) -> None:
    with idem.execution(key, fingerprint="of a stranger who has guessed the key") as stranger:
        stranger.complete()

    with pytest.raises(KeyReusedError), idem.execution(key, fingerprint="of the owner"):
        pytest.fail("unreachable")


class TestTenants:
    """The tenant is a part of the key."""

    def test_cannot_be_imitated_by_another_part(self, idem: Idempotency) -> None:
        keys = [("a", "bc"), ("ab", "c"), ("a", "b", "c"), "a,bc", ("a,bc",), (("a", "bc"),)]

        assert len({idem.key_of(each) for each in keys}) == len(keys)


class TestNamespaces:
    def test_engines_with_different_names_share_no_key(self, server: RedisServer, key: str) -> None:
        engines = [Idempotency(server.url, key_prefix=key, name=name) for name in ("web", "queue")]

        for engine in engines:
            with engine.execution("42") as execution:
                assert execution.decision is Decision.RUN
                execution.complete()
            engine.close()

    def test_blocks_and_batches_of_one_engine_share_their_keys(
        self, idem: Idempotency, key: str
    ) -> None:
        with idem.execution(key) as execution:
            execution.complete()

        with idem.begin_many([key]) as batch:
            assert batch[0].decision is Decision.REPLAY


class TestHashes:
    def test_a_guess_can_be_tested_against_a_name_in_redis(
        self, server: RedisServer, client: redis.Redis, key: str
    ) -> None:
        pin = 7231
        engine = Idempotency(server.url, key_prefix=key)
        with engine.execution(pin) as execution:
            execution.complete()
        engine.close()

        (name,) = names_of(client, key)
        guessing = Idempotency(server.url)  # needs no secret
        assert [n for n in range(10_000) if name.endswith(guessing.key_of(n).encode())] == [pin]

    def test_the_prefix_is_not_a_part_of_the_digest(self, server: RedisServer) -> None:
        one, other = (Idempotency(server.url, key_prefix=prefix) for prefix in ("one", "other"))

        assert one.key_of("42") == other.key_of("42")

    def test_the_digest_has_128_bits_and_the_fingerprint_64(self, idem: Idempotency) -> None:
        key = idem.key_of("42", fingerprint="body")

        assert len(key.digest.removeprefix("~")) == 22  # Base64 without padding
        assert len(key.fingerprint) == 8


def test_a_caller_s_key_is_in_no_record_name_log_or_error(
    idem: Idempotency, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "celery_idempotent")
    errors: list[Any] = []

    @idem.idempotent(name="shop.charge", key="{card}", on_conflict="raise", wait_timeout=0)
    def charge(card: str, customer: str) -> None:
        with pytest.raises(ConflictError) as caught:
            charge(card, customer)
        errors.append(caught.value)

    charge(CARD, CUSTOMER)
    with pytest.raises(KeyReusedError) as reused:
        charge(CARD, f"{CUSTOMER} and others")
    with pytest.raises(KeyRuleError) as invalid:
        idem.key_of((CARD, object()), CUSTOMER)
    with idem.begin_many([(CARD, object()), CARD, CARD], [CUSTOMER, CUSTOMER, "another"]) as batch:
        errors += [entry.error for entry in batch if entry.error]
        assert len(errors) == 3
        batch.complete_many()

    names = names_of(client, idem.settings.key_prefix)
    assert len(names) == 2
    stored = b"".join([*names, *(client.get(name) or b"" for name in names)])  # type: ignore[misc]
    shown = "".join(map(str, [*errors, reused.value, invalid.value])) + caplog.text
    for secret in (CARD, CUSTOMER):
        assert secret.encode() not in stored
        assert secret not in shown


def test_a_publisher_can_name_any_key() -> None:
    """A publisher writes the headers of its messages, those of a derived key included."""
    another_call = Key("shop.charge", "Zk3JtLh1mF4q8vB2yN6w0A", b"8 bytes!")

    headers = put_back.with_derived_key({}, another_call, "own-task-id")

    assert MessageHeaders.read("shop.charge", "own-task-id", headers).key == another_call


def test_a_result_that_was_forged_in_redis_is_returned(
    idem: Idempotency, client: redis.Redis, key: str
) -> None:
    charge = idem.idempotent(name="shop.charge")(lambda order: "genuine")
    charge(key)
    (name,) = names_of(client, idem.settings.key_prefix)
    record: Any = client.get(name)

    client.set(name, record.replace(b'"genuine"', b'"forged!"'), keepttl=True)

    assert charge(key) == "forged!"
