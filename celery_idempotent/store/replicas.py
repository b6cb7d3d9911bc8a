"""Waiting until replicas, or disks, have what was written: ``idempotency_wait_replicas``.

Redis replicates after it has answered. A master that dies in between takes a begin with it that
somebody already acts on, and its heir grants another. WAIT closes most of that gap, not all of it:
what it says holds for the replicas that were asked, and Sentinel may promote another.
"""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.scripts import Reply

#: What must not be forgotten: the right to run, and what came of it.
_LASTING = frozenset({"begin", "complete", "fail", "save_step"})
#: Their answers when they have written.
_WRITTEN = ("begun", "ok")


def wanted(config: StoreConfig) -> bool:
    """Whether anything is waited for."""
    return config.wait_replicas > 0 or config.wait_aof


def wait(config: StoreConfig, script: str) -> tuple[Any, ...]:
    """The command that waits behind `script`; empty if that may be forgotten."""
    if script not in _LASTING:
        return ()
    milliseconds = round(config.wait_timeout * 1000)
    if config.wait_aof:
        return ("WAITAOF", 1, config.wait_replicas, milliseconds)
    return ("WAIT", config.wait_replicas, milliseconds)


def wait_for_nothing() -> tuple[Any, ...]:
    """As :func:`wait` for the disk, behind a script that has written nothing: answered at once."""
    return ("WAITAOF", 1, 0, 1)


def unable(error: Exception) -> str | None:
    """Why the server cannot wait for its disk, if that is what `error` says."""
    if isinstance(error, ResponseError) and "WAITAOF" in str(error):
        return (
            "idempotency_wait_aof needs Redis 7.2 or Valkey, with appendonly yes; "
            f"this server says: {error}"
        )
    return None


def check(config: StoreConfig, reply: Reply, waited: Any) -> None:
    """Take what was written for lost where too few have it: sent again, it is written again.

    Raises:
        StoreUnavailableError: saying how many have it.
    """
    if reply.case not in _WRITTEN:
        return
    on_disk, there = waited if config.wait_aof else (1, waited)
    if there < config.wait_replicas:
        raise StoreUnavailableError(
            f"Redis has it, but only {there} of {config.wait_replicas} replicas have it after "
            f"{config.wait_timeout:g} s (idempotency_wait_replicas)"
        )
    if config.wait_aof and on_disk < 1:
        raise StoreUnavailableError(
            f"Redis has it, but not on its disk after {config.wait_timeout:g} s "
            "(idempotency_wait_aof)"
        )
