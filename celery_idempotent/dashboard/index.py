"""An index of all records, in the memory of this process: Redis has none.

A pass reads the heads of all records, a few at a time; when it ends, the next one begins. A page
rereads the records that it shows, so they are current. A record created after the pass scanned its
part of the keys is missing until the next pass.
"""

from __future__ import annotations

import math
import re
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.key.key import Key
from celery_idempotent.record import layout
from celery_idempotent.record.record import State
from celery_idempotent.store.inspection.record_reader import RecordReader, RecordView
from celery_idempotent.store.record_store import RecordStore

#: Maximum number of records, of some 200 bytes each.
MAX_RECORDS = 2_000_000
#: Seconds that Redis may take to reply.
READ_TIMEOUT = 2.0
#: Longest pass, in seconds, that a request waits for.
QUICK = 0.2
#: Fraction of all records below which a task's records are read by the index `by_task`.
RARE = 0.02
#: Maximum selections per page: one is repeated if its records have changed since indexed.
SELECTIONS = 4

_KEY = re.compile(r"[^:]+:~?[A-Za-z0-9_-]{22}")
_TASK = "(SELECT name FROM names WHERE names.id = task) AS name"

STATES = (*(state.value for state in State), "CORRUPT")
#: Sort orders of a page; "-" before one reverses it.
SORTS = {
    "since": "since",
    "task": "name",
    "state": "state",
    "attempt": "attempt",
    "duration": "duration",
}

_SCHEMA = """
CREATE TABLE names (id INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE records (
    id INTEGER PRIMARY KEY,
    store INTEGER, task INTEGER, digest TEXT, state INTEGER, since INTEGER, attempt INTEGER,
    worker INTEGER, text TEXT, duration INTEGER, pass INTEGER
);
CREATE INDEX by_task ON records (task, state, duration);
CREATE INDEX by_state ON records (state, since);
CREATE INDEX by_since ON records (since);
"""


class Query(NamedTuple):
    """Which records to return, in which order; an empty field selects all."""

    state: str = ""
    #: Part of the name.
    task: str = ""
    #: Part of the label, task, key, task id or worker.
    text: str = ""
    #: Minimum seconds since the record entered its state.
    older_than: float | None = None
    sort: str = "-since"

    def sql(self, names: Mapping[str, int], share: float) -> tuple[str, list[Any]]:
        """Returns the SQL from its source to its order, and the parameters.

        Args:
            names: the numbers of tasks and workers.
            share: the fraction of records whose task matches.
        """
        conditions: list[str] = ["1"]
        values: list[Any] = []
        if self.state:
            conditions.append("state = ?")
            values.append(STATES.index(self.state))
        if self.task:
            conditions.append(f"task IN ({_numbers(names, self.task)})")
        if self.text:
            digest = self.text.rpartition(":")[2] if _KEY.fullmatch(self.text) else self.text
            condition = "instr(text, ?)"
            if numbers := _numbers(names, self.text):
                condition += f" OR task IN ({numbers}) OR worker IN ({numbers})"
            conditions.append(f"({condition})")
            values.append(digest.casefold())
        if self.older_than is not None:
            conditions.append("since < ?")
            values.append((time.time() - self.older_than) * 1000)
        order = SORTS[self.sort.removeprefix("-")] + " DESC" * self.sort.startswith("-")
        source = self.source(share)
        if source.startswith("names"):
            order = f"names.{order}"
        return f"{source} WHERE {' AND '.join(conditions)} ORDER BY {order}", values

    def source(self, share: float) -> str:
        """Returns the table with the index to use: SQLite does not know how rare a value is."""
        column = self.sort.removeprefix("-")
        if self.text:
            return "records NOT INDEXED"
        if self.task and share < RARE:
            return "records INDEXED BY by_task"
        if self.state or column == "state":
            return "records INDEXED BY by_state"
        if column == "task":
            return "names CROSS JOIN records INDEXED BY by_task ON task = names.id"
        return f"records {'INDEXED BY by_since' if column == 'since' else 'NOT INDEXED'}"


def _numbers(names: Mapping[str, int], part: str) -> str:
    part = part.casefold()
    return ", ".join(str(number) for name, number in names.items() if part in name.casefold())


@dataclass
class TaskTotals:
    """The records of one task."""

    states: Counter[str] = field(default_factory=Counter)
    #: Number of executions by duration, as a `_step`.
    durations: Counter[int] = field(default_factory=Counter)

    @property
    def mean(self) -> float:
        """Mean seconds per execution; 0 if none is known."""
        seconds = sum(_seconds(step) * number for step, number in self.durations.items())
        return seconds / (self.durations.total() or 1)

    def quantile(self, part: float) -> float | None:
        """Returns the seconds within which this part of executions ended; None if unknown."""
        left = part * self.durations.total()
        for step, number in sorted(self.durations.items()):
            left -= number
            if left <= 0:
                return _seconds(step)
        return None


def _step(milliseconds: float) -> int:
    """Returns a duration on a logarithmic scale with steps of 9 %."""
    return round(8 * math.log2(milliseconds + 1))


def _seconds(step: int) -> float:
    return (2 ** (step / 8) - 1) / 1000


def _place(view: RecordView) -> tuple[int, int]:
    """Returns a record's state, and its start in milliseconds."""
    record = view.record
    if record is None:
        return STATES.index("CORRUPT"), 0
    since = record.at_ms if record.state.finished else record.token // 1000
    return STATES.index(view.state), since


class RecordIndex:
    """The index, and the connections through which it and the pages read.

    Args:
        stores: the app's stores at the start; tasks added later may bring others.
    """

    def __init__(self, stores: Sequence[RecordStore]) -> None:
        self.stores: list[RecordStore] = []
        self._numbers: dict[RecordStore, int] = {}
        for store in stores:
            self._number(store)
        self._readers: dict[RecordStore, RecordReader] = {}
        self._database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._database.executescript(_SCHEMA)
        self._lock = threading.Lock()
        self._names: dict[str, int] = {}
        self._pages: Iterator[tuple[RecordStore, list[RecordView]]] | None = None
        #: Number of the pass, and of records that it has read.
        self._pass = self._seen = 0
        self._passing = threading.Lock()
        #: When the pass began, its seconds so far, and those of the last pass.
        self._began_at, self._spent, self._cost = 0.0, 0.0, math.inf
        self._totals: tuple[float, dict[str, TaskTotals]] = -math.inf, {}
        #: When the last pass ended; None before.
        self.finished_at: datetime | None = None
        #: Whether Redis has more than `MAX_RECORDS`.
        self.full = False

    def read(
        self, store: RecordStore, keys: Iterable[Key], **options: Any
    ) -> dict[Key, RecordView]:
        """Reads records and updates the index.

        Raises:
            StoreUnavailableError: if Redis does not reply.
        """
        keys = list(keys)
        with self._reader(store) as reader:
            views = reader.get(keys, **options) if keys else {}
        self._add(store, views.values())
        absent = [(self._id(store, key),) for key in keys if key not in views]
        with self._lock:
            self._database.executemany("DELETE FROM records WHERE id = ?", absent)
        return views

    @contextmanager
    def _reader(self, store: RecordStore) -> Iterator[RecordReader]:
        """Yields a reader whose connections stay open unless Redis fails to reply."""
        try:
            if store not in self._readers:
                self._readers[store] = RecordReader.open(store, READ_TIMEOUT)
            yield self._readers[store]
        except IdempotencyError:
            if (reader := self._readers.pop(store, None)) is not None:
                reader.close()
            raise

    def close(self) -> None:
        """Closes the connections."""
        while self._readers:
            self._readers.popitem()[1].close()

    def page(self, query: Query, limit: int, offset: int = 0) -> list[RecordView]:
        """Returns up to `limit` records in their current state.

        Raises:
            StoreUnavailableError: if Redis does not reply.
        """
        counts = {task: found.states.total() for task, found in self.totals().items()}
        matching = sum(counts[task] for task in counts if query.task.casefold() in task.casefold())
        source, values = query.sql({**self._names}, matching / (sum(counts.values()) or 1))
        sql = f"SELECT store, {_TASK}, digest, state, since FROM {source} LIMIT ? OFFSET ?"
        for _ in range(SELECTIONS):
            with self._lock:
                rows = self._database.execute(sql, (*values, limit, offset)).fetchall()
            keys: dict[int, list[Key]] = defaultdict(list)
            for store, task, digest, _, _ in rows:
                keys[store].append(Key(task, digest))
            found = {store: self.read(self.stores[store], keys[store]) for store in keys}
            views = [found[store].get(Key(task, digest)) for store, task, digest, _, _ in rows]
            shown = [view for view in views if view is not None]
            indexed = [row[3:] for row in rows]
            if indexed == [_place(view) for view in shown]:
                break
        return shown

    def started(self, limit: int) -> dict[RecordStore, list[Key]]:
        """Returns the keys of STARTED records by store, oldest first."""
        sql = f"SELECT store, {_TASK}, digest FROM records WHERE state = ? ORDER BY since LIMIT ?"
        with self._lock:
            rows = self._database.execute(sql, (STATES.index("STARTED"), limit)).fetchall()
        keys: dict[RecordStore, list[Key]] = defaultdict(list)
        for store, task, digest in rows:
            keys[self.stores[store]].append(Key(task, digest))
        return keys

    def totals(self) -> dict[str, TaskTotals]:
        """Returns the totals by task, cached for 20 times as long as counting took."""
        until, totals = self._totals
        started_at = time.monotonic()
        if started_at < until:
            return totals
        totals = defaultdict(TaskTotals)
        sql = "SELECT task, state, duration, count(*) FROM records GROUP BY task, state, duration"
        with self._lock:
            names = dict(self._database.execute("SELECT id, name FROM names").fetchall())
            rows = self._database.execute(sql).fetchall()
        for task, state, duration, number in rows:
            found = totals[names[task]]
            found.states[STATES[state]] += number
            if duration is not None:
                found.durations[duration] += number
        ended_at = time.monotonic()
        self._totals = ended_at + 20 * (ended_at - started_at), dict(totals)
        return self._totals[1]

    def advance(self, seconds: float) -> None:
        """Reads records for about `seconds`.

        Raises:
            StoreUnavailableError: if Redis does not reply. A new pass begins with the next call.
        """
        with self._passing:
            self._advance(seconds)

    def refresh(self) -> None:
        """Rereads all records, if the last pass was quick.

        Raises:
            StoreUnavailableError: if Redis does not reply.
        """
        requested_at = time.monotonic()
        if self._cost > QUICK:
            return
        with self._passing:
            if self._began_at < requested_at:
                self._pages = None
                self._advance(10 * QUICK)

    def _advance(self, seconds: float) -> None:
        since = time.monotonic()
        pages, self._pages = self._pages, None
        if pages is None:
            self._began_at, self._spent = since, 0.0
            pages, self._pass, self._seen = self._scan(), self._pass + 1, 0
        for store, page in pages:
            self._add(store, page)
            self._seen += len(page)
            if self._seen > MAX_RECORDS:
                break
            if time.monotonic() > since + seconds:
                self._pages = pages
                self._spent += time.monotonic() - since
                return
        with self._lock:
            self._database.execute("DELETE FROM records WHERE pass < ?", (self._pass,))
        self._cost = self._spent + time.monotonic() - since
        self.full = self._seen > MAX_RECORDS
        self.finished_at = datetime.now(timezone.utc)

    def _scan(self) -> Iterator[tuple[RecordStore, list[RecordView]]]:
        for store in self.stores:
            with self._reader(store) as reader:
                for page in reader.scan(expiry=False):
                    yield store, page

    def _add(self, store: RecordStore, views: Iterable[RecordView]) -> None:
        rows = [self._row(store, view) for view in views]
        with self._lock:
            self._database.execute("BEGIN")
            self._database.executemany(
                "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
            )
            self._database.execute("COMMIT")

    def _row(self, store: RecordStore, view: RecordView) -> tuple[Any, ...]:
        key, record = view.key, view.record
        about = self._id(store, key), self._number(store), self._name(key.task), key.digest
        if record is None:
            return *about, *_place(view), 0, None, key.digest.casefold(), None, self._pass
        began = record.token // 1000
        has_run = record.state.finished and not layout.is_poisoned(record)
        return (
            *about,
            *_place(view),
            record.attempt,
            self._name(record.worker) if record.worker else None,
            f"{record.label}\n{record.task_id}\n{key.digest}".casefold(),
            _step(max(0, record.at_ms - began)) if has_run else None,
            self._pass,
        )

    def _id(self, store: RecordStore, key: Key) -> int:
        return hash((self._number(store), str(key)))

    def _number(self, store: RecordStore) -> int:
        """Returns a store's number in `stores`, adding it if absent."""
        number = self._numbers.setdefault(store, len(self.stores))
        if number == len(self.stores):
            self.stores.append(store)
        return number

    def _name(self, name: str) -> int:
        with self._lock:
            number = self._names.get(name)
            if number is None:
                number = self._names[name] = len(self._names) + 1
                self._database.execute("INSERT INTO names VALUES (?, ?)", (number, name))
        return number
