"""Encrypted results of functions and coroutine functions."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from cryptography.fernet import Fernet

from celery_idempotent import Idempotency
from celery_idempotent.errors import SettingsError
from tests.functions.shop import Calls
from tests.servers.redis_server import RedisServer

OLD, NEW = Fernet.generate_key(), Fernet.generate_key()
SECRET = "VISA-1111-1111-1111"


def engine(server: RedisServer, prefix: str, *keys: bytes) -> Idempotency:
    return Idempotency(server.url, key_prefix=prefix, encryption_keys=keys)


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_the_result_of_a_function_is_encrypted(
    server: RedisServer, client: redis.Redis, key: str, kind: str
) -> None:
    idem, calls = engine(server, key, OLD), Calls(kind)
    runs = []
    card = calls.function(idem, lambda order: runs.append(order) or SECRET)

    assert card("1") == card("1") == SECRET
    assert runs == ["1"]
    (name,) = client.scan_iter(f"{key}:*")
    stored: Any = client.get(name)
    assert b"!json" in stored
    assert b"VISA" not in stored
    calls.close(idem)


def test_an_invalid_encryption_key_is_rejected_at_once(server: RedisServer, key: str) -> None:
    with pytest.raises(SettingsError, match="key 1 of 1 is not a Fernet key"):
        engine(server, key, b"secret")


def test_encryption_keys_are_rejected_for_a_single_function(server: RedisServer, key: str) -> None:
    idem = engine(server, key, OLD)

    with pytest.raises(SettingsError, match="encryption_keys can only be set for the whole engine"):
        idem.idempotent(encryption_keys=(NEW,))(lambda: None)
