"""Processes by their ids."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Returns the ids of its child processes; empty if it has ended."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for child in children.split()]


def with_children(pid: int) -> list[int]:
    """Returns the ids of a process and of its child processes."""
    return [pid, *children_of(pid)]


def send_signal(pids: Iterable[int], signum: signal.Signals) -> list[int]:
    """Sends a signal to each process that has not ended; returns all ids."""
    pids = list(pids)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
    return pids


def processor_seconds(pid: int) -> float:
    """Returns the processor time of a process so far."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
