"""Encrypted results of functions and coroutine functions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
from cryptography.fernet import Fernet

from celery_idempotent import DecryptionError, Idempotency
from celery_idempotent.errors import SettingsError
from tests.servers.redis_server import RedisServer

OLD, NEW = Fernet.generate_key(), Fernet.generate_key()
SECRET = "VISA-1111-1111-1111"


def engine(server: RedisServer, prefix: str, *keys: bytes) -> Idempotency:
    return Idempotency(server.url, key_prefix=prefix, encryption_keys=keys)


def assert_encrypted(client: redis.Redis, prefix: str) -> None:
    (name,) = client.scan_iter(f"{prefix}:*")
    stored: Any = client.get(name)
    assert b"!json" in stored
    assert b"VISA" not in stored


def test_the_result_of_a_function_is_encrypted(
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
    assert_encrypted(client, key)
    idem.close()


def test_the_result_of_a_coroutine_function_is_encrypted(
    server: RedisServer, client: redis.Redis, key: str
) -> None:
    idem = engine(server, key, OLD)
    runs = []

    @idem.idempotent
    async def card(order: int) -> str:
        runs.append(order)
        return SECRET

    async def call_twice() -> list[str]:
        try:
            return [await card(1), await card(1)]
        finally:
            await idem.aclose()

    assert asyncio.run(call_twice()) == [SECRET, SECRET]
    assert runs == [1]
    assert_encrypted(client, key)


def test_keys_can_be_rotated_and_a_lost_key_is_an_error(server: RedisServer, key: str) -> None:
    for keys in [(OLD,), (NEW, OLD), (NEW,)]:
        idem = engine(server, key, *keys)
        card = idem.idempotent(lambda order: SECRET, name="card", key="{order}")
        if keys == (NEW,):
            with pytest.raises(DecryptionError):
                card(1)
        else:
            assert card(1) == SECRET
        idem.close()


def test_an_invalid_encryption_key_is_rejected_at_once(server: RedisServer, key: str) -> None:
    with pytest.raises(SettingsError, match="key 1 of 1 is not a Fernet key"):
        engine(server, key, b"secret")


def test_encryption_keys_are_rejected_for_a_single_function(server: RedisServer, key: str) -> None:
    idem = engine(server, key, OLD)

    with pytest.raises(SettingsError, match="encryption_keys can only be set for the whole engine"):
        idem.idempotent(encryption_keys=(NEW,))(lambda: None)
