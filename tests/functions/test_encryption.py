"""Results of functions that nobody can read in Redis, for code that blocks and code that awaits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
from cryptography.fernet import Fernet

from celery_idempotent import DecryptionError, Idempotency
from celery_idempotent.errors import SettingsError
from celery_idempotent.testing.server import RedisServer

OLD, NEW = Fernet.generate_key(), Fernet.generate_key()
SECRET = "VISA-1111-1111-1111"


def engine(server: RedisServer, prefix: str, *keys: bytes) -> Idempotency:
    return Idempotency(server.url, key_prefix=prefix, encryption_keys=keys)


def assert_hidden(client: redis.Redis, prefix: str) -> None:
    (name,) = client.scan_iter(f"{prefix}:*")
    kept: Any = client.get(name)
    assert b"!json" in kept
    assert b"VISA" not in kept


def test_a_function_is_answered_and_nothing_of_it_is_seen(
    server: RedisServer, client: redis.Redis, key: str
) -> None:
    idem = engine(server, key, OLD)
    runs = []

    @idem.idempotent
    def card(order: int) -> str:
        runs.append(order)
        return SECRET

    assert card(1) == card(1) == SECRET
    assert runs == [1]
    assert_hidden(client, key)
    idem.close()


def test_an_async_function_too(server: RedisServer, client: redis.Redis, key: str) -> None:
    idem = engine(server, key, OLD)
    runs = []

    @idem.idempotent
    async def card(order: int) -> str:
        runs.append(order)
        return SECRET

    async def twice() -> list[str]:
        try:
            return [await card(1), await card(1)]
        finally:
            await idem.aclose()

    assert asyncio.run(twice()) == [SECRET, SECRET]
    assert runs == [1]
    assert_hidden(client, key)


def test_keys_are_rotated_and_may_be_lost(server: RedisServer, key: str) -> None:
    for keys in [(OLD,), (NEW, OLD), (NEW,)]:
        idem = engine(server, key, *keys)
        card = idem.idempotent(lambda order: SECRET, name="card", key="{order}")
        if keys == (NEW,):
            with pytest.raises(DecryptionError):
                card(1)
        else:
            assert card(1) == SECRET
        idem.close()


def test_a_key_that_is_none_is_refused_at_once(server: RedisServer, key: str) -> None:
    with pytest.raises(SettingsError, match="key 1 of 1 is not a Fernet key"):
        engine(server, key, b"secret")


def test_one_function_has_no_keys_of_its_own(server: RedisServer, key: str) -> None:
    idem = engine(server, key, OLD)

    with pytest.raises(SettingsError, match="encryption_keys can only be set for the whole engine"):
        idem.idempotent(encryption_keys=(NEW,))(lambda: None)
