"""The workers' counts over time, for the charts. The sampler adds to it, and the pages read it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from celery_idempotent.dashboard.database import SqliteDatabase

#: Seconds per step, the unit of storage.
STEP = 30
#: Ranges of the charts: seconds, and steps per bar, by name.
RANGES = {"15m": (900, 1), "1h": (3600, 1), "1d": (86400, 24), "7d": (7 * 86400, 168)}

_SCHEMA = """
CREATE TABLE IF NOT EXISTS counts (
    step INTEGER, task TEXT, name TEXT, number INTEGER, PRIMARY KEY (step, task, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY);
"""


class History:
    """Differences of the workers' counters, which begin at zero when a worker starts.

    Args:
        file: a SQLite file, which outlives this process; in memory by default.

    Raises:
        sqlite3.Error: if the file cannot be used.
    """

    def __init__(self, file: str = ":memory:") -> None:
        self._database = SqliteDatabase(file, _SCHEMA)
        #: The counters of each worker and task at the last `add`, which stores the differences.
        self._seen: dict[tuple[str, str], Mapping[str, int]] = {}
        #: The current step, and its differences by task and name.
        self._current: tuple[int, Counter[tuple[str, str]]] = 0, Counter()
        #: The last result of `range` by its name, with the step in which it was read.
        self._queried: dict[str, tuple[int, Range]] = {}

    def add(self, now: float, counts: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
        """Adds the counters of each worker, by task.

        Args:
            now: seconds since 1970.
        """
        step = int(now // STEP)
        if self._current[0] != step:
            self._current = step, Counter()
        current, changed = self._current[1], set()
        for worker, by_task in counts.items():
            is_new = not any(name == worker for name, _ in self._seen)
            for task, counter in by_task.items():
                # What a worker had counted before it was first seen belongs to no known step.
                before = self._seen.get((worker, task), counter if is_new else {})
                for name, number in counter.items():
                    # A smaller number means a restarted worker.
                    last = before.get(name, 0)
                    if difference := number - last if number >= last else number:
                        current[task, name] += difference
                        changed.add((task, name))
                self._seen[worker, task] = counter
        self._database.write("INSERT OR IGNORE INTO steps VALUES (?)", [(step,)])
        # If two processes share a file, keep the larger number.
        self._database.write(
            "INSERT INTO counts VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE "
            "SET number = max(number, excluded.number)",
            [(step, *column, current[column]) for column in changed],
        )
        if step % 120 == 0:
            oldest = step - RANGES["7d"][0] // STEP
            for table in ("counts", "steps"):
                self._database.write(f"DELETE FROM {table} WHERE step < ?", [(oldest,)])

    def range(self, name: str, now: float) -> Range:
        """Returns the counts in the range `name` of `RANGES`, until `now`."""
        seconds, width = RANGES[name]
        last = int(now // STEP)
        version, known = self._queried.get(name, (0, None))
        # A range whose bars are wider than a step is read from the database once per step.
        if known is not None and width > 1 and version == last:
            return known
        bars = seconds // STEP // width
        first = last // width - bars + 1
        rows = self._database.read(
            "SELECT step / ?, task, name, sum(number) FROM counts WHERE step >= ? GROUP BY 1, 2, 3",
            (width, first * width),
        )
        ((since, seen),) = self._database.read(
            "SELECT min(step), total(step >= ?) FROM steps", (first * width,)
        )
        numbers: dict[str, list[int]] = defaultdict(lambda: [0] * bars)
        tasks: dict[str, Counter[str]] = defaultdict(Counter)
        for bar, task, counted, number in rows:
            if bar < first + bars:
                numbers[counted][bar - first] += number
                tasks[task][counted] += number
        since, seen = (last if since is None else since) * STEP, int(seen) * STEP
        result = Range(seconds, width * STEP, since, seen, dict(numbers), dict(tasks))
        self._queried[name] = last, result
        return result


class Range(NamedTuple):
    """The counts in a range of time."""

    #: Seconds of the range, and of one bar.
    seconds: int
    bar: int
    #: When the history begins, in seconds since 1970.
    since: int
    #: Seconds of the range during which the dashboard ran.
    seen: int
    #: The bars of each counter, oldest first.
    numbers: dict[str, list[int]]
    #: The sums by task and name.
    tasks: dict[str, Counter[str]]

    def sums(self, names: Iterable[str]) -> list[int]:
        """Returns, for each bar of the chart, the sum of these counters."""
        series = [self.numbers.get(name, [0] * (self.seconds // self.bar)) for name in names]
        return [sum(column) for column in zip(*series, strict=True)]
