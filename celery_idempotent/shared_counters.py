"""How often each signal was sent for each task, over all processes of a worker.

No record can tell how many duplicates it has answered, and a round trip to note it would cost more
than the answer. So each process counts what it does, in memory that it shares with the worker's
main process: a row for each process of the pool, written by that one alone, and summed by whoever
asks. A process that takes a dead one's place goes on in its row.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from billiard.process import current_process

from celery_idempotent import signals

logger = logging.getLogger(__name__)

#: Processes of one worker that are counted.
ROWS = 256
_CELL = 8


class SharedCounters:
    """Made in the worker's main process, before its pool is started.

    Args:
        tasks: names of the tasks whose signals are counted.
    """

    def __init__(self, tasks: Iterable[str]) -> None:
        self._tasks = tuple(tasks)
        self._columns = {
            (task, signal.name): column
            for column, (task, signal) in enumerate(
                (task, signal) for task in self._tasks for signal in signals.ALL
            )
        }
        self._width = len(self._columns) * _CELL
        self._cells = memoryview(mmap.mmap(-1, self._width * ROWS + 2 * _CELL)).cast("Q")
        self._row = 0
        self._lock = threading.Lock()

    def enter_process(self) -> None:
        """Count in this process' row from now on."""
        index = getattr(current_process(), "index", 0)
        self._row = index * len(self._columns) if index < ROWS else -1
        self._lock = threading.Lock()

    def count(self, signal: Any, sender: Any) -> None:
        """One more; called for each signal that the gate sends."""
        column = self._columns.get((getattr(sender, "name", ""), signal.name))
        if column is not None and self._row >= 0:
            with self._lock:
                self._cells[self._row + column] += 1

    def sums(self) -> dict[str, Counter[str]]:
        """By task, then by the signal's short name; what never happened is left out."""
        found: dict[str, Counter[str]] = {task: Counter() for task in self._tasks}
        for (task, signal), column in self._columns.items():
            cells = range(column, len(self._columns) * ROWS, len(self._columns))
            if number := sum(self._cells[cell] for cell in cells):
                found[task][signal.removeprefix(signals.PREFIX)] = number
        return {task: counts for task, counts in found.items() if counts}

    # Two more cells, for what only the main process is told.

    @property
    def events_wanted(self) -> bool:
        """Whether somebody listens to task events."""
        return bool(self._cells[-1])

    @events_wanted.setter
    def events_wanted(self, wanted: bool) -> None:
        self._cells[-1] = int(wanted)

    @property
    def shutting_down(self) -> bool:
        """Whether the worker takes no more messages."""
        return bool(self._cells[-2])

    @shutting_down.setter
    def shutting_down(self, begun: bool) -> None:
        self._cells[-2] = int(begun)


#: The one of this worker; None in any other program.
shared_counters: SharedCounters | None = None


def start(tasks: Iterable[str]) -> SharedCounters:
    """Count from now on, in this process and in those that it forks."""
    global shared_counters
    shared_counters = SharedCounters(tasks)
    signals.counter = shared_counters.count
    return shared_counters
