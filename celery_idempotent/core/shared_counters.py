"""Counters of decisions and outcomes by task, in memory that all processes of a worker share.

Records do not count their replays, since that would cost each replay another round trip. Instead,
each process of the pool increments counters in a row of its own, and readers add up the rows. A
process that replaces a dead one continues in the dead one's row. Forked processes inherit the
memory; spawned ones map the file that `FILE_VARIABLE` names.

The memory also has what the worker's main process needs to know of its pool: which processes let
their leases expire, where their bodies are, and which messages have reached their tasks.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

from billiard.process import current_process

from celery_idempotent.core import worker
from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.events.report import counters
from celery_idempotent.core.events.table import COUNTED
from celery_idempotent.core.lease import Lease
from celery_idempotent.core.lease.heartbeat import heartbeat

#: Number of rows; processes beyond it are not counted.
MAX_PROCESSES = 256
#: The environment variable that names the file of the counters to spawned processes.
FILE_VARIABLE = "CELERY_IDEMPOTENT_COUNTERS"
#: Number of cells for the times at which messages have reached their tasks.
_ENTRIES = 4096
_CELL_BYTES = 8
#: Bytes for the stack that the heartbeat of each process has read after its last request.
_STACK_BYTES = 2048


def _flag(cell: int) -> Any:
    """Returns a property whose value, true or false, is in this cell of the shared memory."""
    return property(
        lambda self: bool(self._cells[cell]),
        lambda self, value: self._cells.__setitem__(cell, int(value)),
    )


class SharedCounters:
    """Counters of one worker. Must be created in its main process, before the pool starts.

    Args:
        tasks: names of the tasks whose calls are counted.
        file: a descriptor of the file that processes map; -1 for memory that forks inherit.
    """

    def __init__(self, tasks: Iterable[str], file: int = -1) -> None:
        self._tasks = tuple(tasks)
        names = [(task, name) for task in self._tasks for name in COUNTED]
        self._columns = {name: column for column, name in enumerate(names)}
        # The rows of counters are followed by the pid and the lease expiry of each process, by the
        # entries, by three cells (the last ones) for `note_unbegun` and the flags, and by the
        # stacks.
        self._rows_end = len(names) * MAX_PROCESSES
        self._entries = self._rows_end + 2 * MAX_PROCESSES
        cells = self._entries + _ENTRIES + 3
        self._stacks = cells * _CELL_BYTES
        size = self._stacks + MAX_PROCESSES * _STACK_BYTES
        if file != -1 and not os.fstat(file).st_size:
            os.ftruncate(file, size)
        self._memory = memoryview(mmap.mmap(file, size))
        self._cells = self._memory[: self._stacks].cast("Q")
        #: The first cell of this process's row; None if there are too many processes.
        self._row_start: int | None = 0
        self._lock = threading.Lock()

    def enter_process(self) -> None:
        """Selects the row of this pool process, which has just started."""
        index = getattr(current_process(), "index", 0)
        self._row_start = index * len(self._columns) if index < MAX_PROCESSES else None
        # A forked process may have inherited the lock while a thread held it.
        self._lock = threading.Lock()
        if index < MAX_PROCESSES:
            cell = self._rows_end + 2 * index
            self._cells[cell], self._cells[cell + 1] = os.getpid(), 0

            # For `frozen_processes` and `stack`, which the worker's main process calls: see the
            # attributes of the heartbeat.
            def expect(expiry: float) -> None:
                self._cells[cell + 1] = 0 if expiry == float("inf") else round(expiry * 1000)

            def note(leases: Sequence[Lease], stack: list[str]) -> None:
                text = "\n".join([" ".join(str(lease.token) for lease in leases), *stack])
                data = text.encode(errors="replace")[:_STACK_BYTES].ljust(_STACK_BYTES, b"\0")
                self._memory[self._stack_at(index)] = data

            heartbeat.on_expected, heartbeat.on_observed = expect, note

    def count(self, name: str, task: str) -> None:
        """Increments the counter `name` of `task`."""
        column = self._columns.get((task, name))
        if column is not None and self._row_start is not None:
            with self._lock:
                self._cells[self._row_start + column] += 1

    def enter(self, task_id: str) -> None:
        """Notes that a message has reached ``IdempotentTask.__call__`` in a pool process."""
        self._cells[self._entry_of(task_id)] = now_ms()

    def has_entered(self, task_id: str, since_ms: int) -> bool:
        """Returns whether a message has reached its task since a time of :func:`now_ms`.

        Several messages share a cell, so the reply may be wrongly true, but not wrongly false.
        """
        return bool(self._cells[self._entry_of(task_id)] >= since_ms)

    def _entry_of(self, task_id: str) -> int:
        # A task id comes from outside: it may be no text, or text that cannot be encoded.
        return self._entries + crc32(str(task_id).encode(errors="replace")) % _ENTRIES

    def has_process(self, pid: int) -> bool:
        """Returns whether this process of the pool uses these counters: a spawned one may not."""
        pids = self._cells[self._rows_end : self._entries].tolist()[::2]
        return pid == os.getpid() or pid in pids

    def frozen_processes(self) -> frozenset[int]:
        """Returns the living processes of the pool that have let their leases expire."""
        now, cells = now_ms(), self._cells[self._rows_end : self._entries].tolist()
        late = (pid for pid, at in zip(cells[::2], cells[1::2], strict=True) if 0 < at < now)
        return frozenset(pid for pid in late if is_alive(pid))

    def stack(self, pid: int, token: int) -> list[str]:
        """Returns where the execution `token` of a process was at its last renewal, if known."""
        pids = self._cells[self._rows_end : self._entries].tolist()[::2]
        data = bytes(self._memory[self._stack_at(pids.index(pid))]) if pid in pids else b""
        tokens, *lines = data.rstrip(b"\0").decode(errors="ignore").split("\n")
        return lines if str(token) in tokens.split() else []

    def _stack_at(self, index: int) -> slice:
        start = self._stacks + index * _STACK_BYTES
        return slice(start, start + _STACK_BYTES)

    def totals(self) -> dict[str, Counter[str]]:
        """Returns the sums over all processes, for each task; counters of zero are left out."""
        totals: dict[str, Counter[str]] = {task: Counter() for task in self._tasks}
        for (task, name), column in self._columns.items():
            if number := sum(self._cells[column : self._rows_end : len(self._columns)]):
                totals[task][name] = number
        return totals

    def note_unbegun(self) -> None:
        """Notes that a message has ended without having begun: it may have left a reservation."""
        self._cells[-3] = round(time.time() * 1000)

    def unbegun_since(self, timestamp: float) -> bool:
        """Returns whether `note_unbegun` was called since `timestamp` (seconds since the epoch)."""
        return bool(self._cells[-3] >= (timestamp - 1.0) * 1000)

    #: Whether the worker sends task events. The main process sets it, and all processes read it.
    task_events_enabled = _flag(-1)
    #: Whether the worker is shutting down and takes no more messages; set and read likewise.
    shutting_down = _flag(-2)


def now_ms() -> int:
    """Returns the milliseconds of the clock of leases."""
    return round(lease_now() * 1000)


def is_alive(pid: int) -> bool:
    """Returns whether there is a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process has the pid
    return True


def start(tasks: Iterable[str], file: int = -1) -> SharedCounters:
    """Starts counting in this process and in those that it forks; arguments as `SharedCounters`."""
    if worker.counters is not None:
        counters.remove(worker.counters.count)
    worker.counters = shared = SharedCounters(tasks, file)
    counters.append(shared.count)
    return shared
