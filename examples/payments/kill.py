"""Kills a process during a charge with SIGKILL, as the kernel does when memory runs out."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass

from .ledger import Ledger
from .worker import Worker

TIMEOUT_SECONDS = 20.0
POLL_SECONDS = 0.01


class NotKilledError(Exception):
    """No process could be killed during the charge."""


@dataclass(frozen=True)
class Kill:
    """A pool process that was killed before it wrote its charge to the ledger."""

    event_id: str
    pid: int
    at: float  # Unix time in seconds

    def recovery_seconds(self, ledger: Ledger) -> float | None:
        """Returns the seconds until the event's next attempt; None if there was none."""
        later = [at for at in ledger.attempt_times(self.event_id) if at > self.at]
        return min(later) - self.at if later else None


def kill_while_charging(event_id: str, ledger: Ledger, worker: Worker) -> Kill:
    """Waits until a pool process has begun to charge `event_id`, and kills it.

    Raises `NotKilledError` if none begins, or if the charge was written before the kill.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while (pid := ledger.first_attempt_pid(event_id)) is None:
        worker.check()
        if time.monotonic() > deadline:
            raise NotKilledError(
                f"No process began to charge {event_id} within {TIMEOUT_SECONDS:.0f} s, "
                "so none was killed."
            )
        time.sleep(POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    kill = Kill(event_id, pid, time.time())
    if any(row.payment.event_id == event_id and row.pid == pid for row in ledger.charges()):
        raise NotKilledError(f"{event_id} was charged before its process could be killed.")
    return kill
