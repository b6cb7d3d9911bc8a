"""Waits until replicas have a write: ``idempotency_wait_replicas``.

Redis replicates after it has replied. If a master fails in between, a begin is lost whose execution
runs already, and the promoted replica grants another. WAIT closes most of that gap, not all of it:
a replica that did not acknowledge the write may be promoted.
"""

from __future__ import annotations

from typing import Any

from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.scripts import Reply

#: Scripts whose writes must not be lost: the right to run, and what came of it.
_WAITING_SCRIPTS = frozenset({"begin", "complete", "fail", "save_step"})
#: Their replies when they have written.
_WRITTEN = ("begun", "ok")


def wanted(config: StoreConfig) -> bool:
    """Returns whether the config requires waiting."""
    return config.wait_replicas > 0


def wait(config: StoreConfig, script: str) -> tuple[Any, ...]:
    """Returns the command that follows `script` and waits for its write; empty if none does."""
    if script not in _WAITING_SCRIPTS:
        return ()
    return ("WAIT", config.wait_replicas, round(config.wait_timeout * 1000))


def check(config: StoreConfig, reply: Reply, acknowledged: int) -> None:
    """Treats a write that too few replicas have as failed: the command can be sent again.

    Raises:
        StoreUnavailableError: with the number of replicas that have the write.
    """
    if reply.case in _WRITTEN and acknowledged < config.wait_replicas:
        raise StoreUnavailableError(
            f"the write reached the primary, but only {acknowledged} of {config.wait_replicas} "
            f"replicas within {config.wait_timeout:g} s (idempotency_wait_replicas)"
        )
