"""Kills processes with SIGKILL, as the kernel does when memory runs out."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .journal import Journal
from .ledger import Ledger
from .worker import Worker

TIMEOUT_SECONDS = 20.0
POLL_SECONDS = 0.01


class NotKilledError(Exception):
    """No process could be killed at the intended point."""


@dataclass(frozen=True)
class Kill:
    """A pool process that was killed while it had the message of `event_id`."""

    event_id: str
    pid: int
    at: float  # Unix time in seconds

    def recovery_seconds(self, journal: Journal) -> float | None:
        """Returns the seconds until the event's next attempt; None if there was none."""
        later = [at for at in journal.attempt_times(self.event_id) if at > self.at]
        return min(later) - self.at if later else None


def kill_while_charging(
    event_id: str, journal: Journal, ledger: Ledger, worker: Worker, meanwhile: Callable[[], None]
) -> Kill:
    """Waits until a pool process has begun to charge `event_id`, and kills it after `meanwhile`.

    Raises `NotKilledError` if none begins, or if the charge was written before the kill.
    """
    find = partial(journal.first_attempt_pid, event_id)
    pid = _wait(event_id, find, "began to charge", worker)
    meanwhile()
    kill = _kill(event_id, pid)
    if any(charge.pid == kill.pid for charge in ledger.charges(event_id)):
        raise NotKilledError(f"{event_id} was charged before its process could be killed.")
    return kill


def kill_after_commit(event_id: str, journal: Journal, ledger: Ledger, worker: Worker) -> Kill:
    """Waits until the charge of `event_id` is committed, and kills the process that did it.

    Raises `NotKilledError` if none is, or if the execution was completed before the kill.
    """

    def find() -> int | None:
        charges = ledger.charges(event_id)
        return charges[0].pid if charges else None

    kill = _kill(event_id, _wait(event_id, find, "committed the charge of", worker))
    (charge, *_) = ledger.charges(event_id)
    if journal.was_completed(charge.task_id, before=kill.at):
        raise NotKilledError(f"{event_id} was completed before its process could be killed.")
    return kill


def _wait(event_id: str, find: Callable[[], int | None], what: str, worker: Worker) -> int:
    """Returns the process that `find` returns, as soon as there is one."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while (pid := find()) is None:
        worker.check()
        if time.monotonic() > deadline:
            raise NotKilledError(
                f"No process {what} {event_id} within {TIMEOUT_SECONDS:.0f} s, so none was killed."
            )
        time.sleep(POLL_SECONDS)
    return pid


def _kill(event_id: str, pid: int) -> Kill:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return Kill(event_id, pid, time.time())
