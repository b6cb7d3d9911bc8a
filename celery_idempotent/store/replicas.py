"""Waits until replicas, or disks, have a write: ``idempotency_wait_replicas``.

Redis replicates after it has replied. If a master fails in between, a begin is lost whose execution
runs already, and the promoted replica grants another. WAIT closes most of that gap, not all of it:
a replica that did not acknowledge the write may be promoted.
"""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.scripts import Reply

#: Scripts whose writes must not be lost: the right to run, and what came of it.
_WAITING_SCRIPTS = frozenset({"begin", "complete", "fail", "save_step"})
#: Their replies when they have written.
_WRITTEN = ("begun", "ok")


def wanted(config: StoreConfig) -> bool:
    """Returns whether the config requires waiting."""
    return config.wait_replicas > 0 or config.wait_aof


def wait(config: StoreConfig, script: str) -> tuple[Any, ...]:
    """Returns the command that follows `script` and waits for its write; empty if none does."""
    if script not in _WAITING_SCRIPTS:
        return ()
    milliseconds = round(config.wait_timeout * 1000)
    if config.wait_aof:
        return ("WAITAOF", 1, config.wait_replicas, milliseconds)
    return ("WAIT", config.wait_replicas, milliseconds)


def wait_for_nothing() -> tuple[Any, ...]:
    """Returns a WAITAOF that the server replies to at once, to follow a script that only reads."""
    return ("WAITAOF", 1, 0, 1)


def unable(error: Exception) -> str | None:
    """Returns a message if `error` means that the server does not support WAITAOF, else None."""
    if isinstance(error, ResponseError) and "WAITAOF" in str(error):
        return (
            "idempotency_wait_aof needs Redis 7.2 or Valkey, with appendonly yes; "
            f"this server replied: {error}"
        )
    return None


def check(config: StoreConfig, reply: Reply, waited: Any) -> None:
    """Treats a write that too few replicas have as failed: the command can be sent again.

    Raises:
        StoreUnavailableError: with the number of replicas that have the write.
    """
    if reply.case not in _WRITTEN:
        return
    on_disk, acknowledged = waited if config.wait_aof else (1, waited)
    if acknowledged < config.wait_replicas:
        raise StoreUnavailableError(
            f"Redis has it, but only {acknowledged} of {config.wait_replicas} replicas have it "
            f"after {config.wait_timeout:g} s (idempotency_wait_replicas)"
        )
    if config.wait_aof and on_disk < 1:
        raise StoreUnavailableError(
            f"Redis has it, but not on its disk after {config.wait_timeout:g} s "
            "(idempotency_wait_aof)"
        )
