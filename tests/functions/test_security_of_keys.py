"""The claims of docs/security.md, "Security of keys": what a key protects, and what it does not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import redis

from celery_idempotent import ConflictError, Decision, Idempotency, KeyReusedError, KeyRuleError
from tests.servers.redis_server import RedisServer

#: A key that a caller brings, and data that must not appear anywhere either.
CARD, CUSTOMER = "4111-1111-1111-1111", "Ada Lovelace"


def names_of(client: redis.Redis, prefix: str) -> list[bytes]:
    names: list[bytes] = list(client.scan_iter(f"{prefix}:*"))
    return names


def test_a_tenant_cannot_be_imitated_by_another_part_of_the_key(idem: Idempotency) -> None:
    keys = [("a", "bc"), ("ab", "c"), ("a", "b", "c"), "a,bc", ("a,bc",), (("a", "bc"),)]

    assert len({idem.key_of(each) for each in keys}) == len(keys)


def test_engines_with_different_names_share_no_key(server: RedisServer, key: str) -> None:
    for name in ("web", "queue"):
        engine = Idempotency(server.url, key_prefix=key, name=name)
        with engine.execution("42") as execution:
            assert execution.decision is Decision.RUN
            execution.complete()
        engine.close()


class TestHashes:
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


def test_a_result_that_was_forged_in_redis_is_returned(
    idem: Idempotency, client: redis.Redis, key: str
) -> None:
    charge = idem.idempotent(name="shop.charge")(lambda order: "genuine")
    charge(key)
    (name,) = names_of(client, idem.settings.key_prefix)
    record: Any = client.get(name)

    client.set(name, record.replace(b'"genuine"', b'"forged!"'), keepttl=True)

    assert charge(key) == "forged!"
