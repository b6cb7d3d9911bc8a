"""Results, errors and steps are encrypted in Redis and in the offload storage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet

from celery_idempotent import CorruptRecordError, IdempotentTask
from tests.flow.deliveries import Make
from tests.servers.redis_server import RedisServer

Stored = Callable[[], bytes]

SECRET = "VISA-1111-1111-1111"
OLD, NEW = Fernet.generate_key().decode(), Fernet.generate_key().decode()


class Keyring:
    """Encryption keys that a test changes, as a deployment would."""

    def __init__(self) -> None:
        self.keys: list[str] = [OLD]

    def __call__(self) -> list[str]:
        return self.keys


@pytest.fixture
def keyring() -> Keyring:
    return Keyring()


@pytest.fixture
def encrypting(task: Make, keyring: Keyring) -> Make:
    def make(body: Callable[..., Any], **options: Any) -> IdempotentTask:
        return task(body, encryption_keys=keyring, **options)

    return make


@pytest.fixture
def stored_bytes(server: RedisServer, tmp_path: Path) -> Stored:
    """Returns all bytes that Redis and the offload storage hold for the library."""

    def read() -> bytes:
        client = server.client()
        names = list(client.scan_iter("idem:*"))
        records = [client.get(name) for name in names]
        return b"".join([*names, *records, *(path.read_bytes() for path in tmp_path.iterdir())])

    return read


def deploy(task: IdempotentTask) -> None:
    """Make the task read its settings again."""
    type(task)._configurations = {}
    task.app._idempotency_executors.clear()


def with_step(self: IdempotentTask, order: str) -> dict[str, str]:
    card = self.idempotency.step("card", lambda: {"card": SECRET})
    if order == "fails":
        raise ValueError(card["card"])
    return card


def test_results_steps_and_errors_are_encrypted(encrypting: Make, stored_bytes: Stored) -> None:
    passing, final = encrypting(with_step), encrypting(with_step, replay_errors=(ValueError,))
    assert passing.delay("1").get() == passing.delay("1").get() == {"card": SECRET}
    for task in (passing, final):
        for _ in range(2):
            with pytest.raises(ValueError, match=SECRET):
                task.delay("fails")

    assert b"VISA" not in stored_bytes()
    assert len(stored_bytes()) > 300


def test_keys_can_be_rotated_and_lost_ones_restored(encrypting: Make, keyring: Keyring) -> None:
    runs = []

    def body(self: IdempotentTask, order: str) -> str:
        runs.append(order)
        return SECRET

    task = encrypting(body)
    task.delay("before")
    keyring.keys = [NEW, OLD]
    deploy(task)
    task.delay("after")
    assert task.delay("before").get() == SECRET

    keyring.keys = [NEW]
    deploy(task)
    assert task.delay("after").get() == SECRET
    for _ in range(2):
        with pytest.raises(CorruptRecordError, match="decrypted.*add the key, or forget") as caught:
            task.delay("before")
        assert SECRET not in str(caught.value)

    keyring.keys = [NEW, OLD]
    deploy(task)
    assert task.delay("before").get() == SECRET
    assert runs == ["before", "after"]


def test_forgetting_the_record_recovers_from_a_lost_key(encrypting: Make, keyring: Keyring) -> None:
    task = encrypting(with_step)
    task.delay("1")
    with pytest.raises(ValueError, match=SECRET):
        task.delay("fails")  # leaves a finished step
    keyring.keys = [NEW]
    deploy(task)
    for order in ("1", "fails"):
        with pytest.raises(CorruptRecordError, match="decrypted"):
            task.delay(order)

    assert task.idempotency_forget("1")
    assert task.idempotency_forget("fails")

    assert task.delay("1").get() == {"card": SECRET}
    with pytest.raises(ValueError, match=SECRET):
        task.delay("fails")


@pytest.mark.parametrize(("prefix", "order"), [("idem", "theirs"), ("staging", "mine")])
def test_a_record_copied_to_another_key_is_rejected(
    encrypting: Make, server: RedisServer, prefix: str, order: str
) -> None:
    """Or from another prefix."""
    task = encrypting(with_step, key_prefix=prefix)
    task.delay(order)
    client = server.client()
    copied = client.get(f"{prefix}:{task.idempotency_key_of(order)}")
    assert isinstance(copied, bytes)
    client.set(f"idem:{task.idempotency_key_of('mine')}", copied, px=60_000)

    type(task).idempotency_key_prefix = "idem"
    deploy(task)

    with pytest.raises(CorruptRecordError):
        task.delay("mine")
