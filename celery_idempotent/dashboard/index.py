"""An index of all records, in the memory of this process, since Redis cannot sort and search them.

The sampler reads the heads of all records, a few at a time: that is a *pass*, and when it ends, the
next one begins. A page rereads the records that it shows, so they are current. A record that is
created after the pass has scanned its part of the names is missing until the next pass.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

from celery_idempotent.core.key import Key
from celery_idempotent.core.record import State, layout
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.server_info import distinct, location
from celery_idempotent.dashboard.database import SqliteDatabase
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.operations.calls.formatting import parse_duration
from celery_idempotent.operations.calls.statistics import MAX_NAMES, OTHER_NAMES
from celery_idempotent.operations.records.query import words_of
from celery_idempotent.operations.records.reader import RecordReader, RecordView

#: Maximum number of records, of some 300 bytes each.
MAX_RECORDS = 2_000_000
#: Maximum characters of a task id, or of another text to search in.
MAX_WORD = 500
#: Maximum names of tasks in one query.
MAX_VALUES = 1_000
#: Seconds that Redis may take to reply.
READ_TIMEOUT = 2.0
#: A pass that takes less, in seconds, is made anew for each request.
QUICK = 0.2
#: Fraction of all records below which a task's records are selected by the SQL index `by_task`.
RARE = 0.02
#: Maximum selections per page. If a record has changed since it was indexed, the page is selected
#: again, because the record may belong elsewhere.
SELECTIONS = 4

_KEY = re.compile(r"[^:]+:~?[A-Za-z0-9_-]{22}")

STATES = (*(state.value for state in State), "CORRUPT")
#: Sort orders of a page; "-" before one reverses it.
SORTS = ("since", "task", "state", "attempt", "duration")

_SCHEMA = """
CREATE TABLE records (
    id INTEGER PRIMARY KEY,
    store INTEGER, task TEXT, digest TEXT, state INTEGER, since INTEGER, attempt INTEGER,
    label TEXT, text TEXT, duration INTEGER, pass INTEGER
);
CREATE INDEX by_task ON records (task, state, duration);
CREATE INDEX by_state ON records (state, since);
CREATE INDEX by_since ON records (since);
"""


class Query(NamedTuple):
    """Which records to show, in which order, as in a query string; an empty field selects all."""

    state: str = ""
    #: Part of the task's name.
    task: str = ""
    #: Part of the label, task, key, task id or worker.
    text: str = ""
    label: str = ""
    #: Minimum time since the record entered its state, such as ``10m``.
    older_than: str = ""
    sort: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> Query:
        """Returns the query of a request's parameters."""
        return cls(**{name: parameters.get(name, "").strip() for name in cls._fields})

    @property
    def selects(self) -> bool:
        """Whether it leaves any records out."""
        return any(self._replace(sort=""))

    def sql(self, counts: Mapping[str, int]) -> tuple[str, list[Any]]:
        """Returns the SQL after FROM, and its parameters.

        Args:
            counts: the number of records by task.

        Raises:
            ValueError: if a field is invalid.
        """
        state, sort = self.state.upper(), self.sort or "-since"
        column = sort.removeprefix("-")
        if state not in ("", *STATES):
            raise ValueError(f"{self.state!r} is not one of {', '.join(STATES)}")
        if column not in SORTS:
            raise ValueError(f"{sort!r} is not one of {', '.join(SORTS)}")
        hint = ""
        conditions: list[str] = ["1"]
        values: list[Any] = []
        if state:
            conditions.append("state = ?")
            values.append(STATES.index(state))
        if self.task and len(counts) > MAX_VALUES:
            conditions.append("instr(lower(task), ?)")
            values.append(self.task.casefold())
        elif self.task:
            tasks = [task for task in counts if self.task.casefold() in task.casefold()]
            # SQLite has no statistics of values, so the choice of the index is made here.
            is_rare = sum(counts[task] for task in tasks) <= RARE * sum(counts.values())
            hint = "INDEXED BY by_task" if is_rare else hint
            # For a frequent task, the "+" before the column keeps SQLite from using its index.
            places = ", ".join("?" * len(tasks))
            conditions.append(f"{'' if is_rare else '+'}task IN ({places})")
            values += tasks
        if self.label:
            conditions.append("instr(label, ?)")
            values.append(self.label.casefold())
        if self.text:
            digest = self.text.rpartition(":")[2] if _KEY.fullmatch(self.text) else self.text
            conditions.append("instr(text, ?)")
            values.append(digest.casefold())
        if self.older_than:
            age = parse_duration(self.older_than).total_seconds()
            conditions.append("since < ?")
            values.append((time.time() - age) * 1000)
        order = column + " DESC" * sort.startswith("-")
        if self.text and not self.sort:
            # Records whose label or task contains the text come first: a short text is found by
            # chance in digests and task ids.
            order = f"instr(label, ?) OR instr(lower(task), ?) DESC, {order}"
            values += [self.text.casefold()] * 2
        return f"records {hint} WHERE {' AND '.join(conditions)} ORDER BY {order}", values


@dataclass
class TaskTotals:
    """The records of one task."""

    states: Counter[str] = field(default_factory=Counter)
    #: Number of executions by duration, as a `_step`.
    durations: Counter[int] = field(default_factory=Counter)

    def add(self, other: TaskTotals) -> None:
        """Adds the records of another task."""
        self.states.update(other.states)
        self.durations.update(other.durations)

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


def bounded(totals: Mapping[str, TaskTotals], known: Collection[str]) -> dict[str, TaskTotals]:
    """Returns the totals of `known` tasks, and of the `MAX_NAMES` other names with most records.

    The other names share one entry.
    """
    others = sorted(totals.keys() - known, key=lambda name: -totals[name].states.total())
    shown = {*known, *others[:MAX_NAMES]}
    result = {name: found for name, found in totals.items() if name in shown}
    for name in others[MAX_NAMES:]:
        result.setdefault(OTHER_NAMES, TaskTotals()).add(totals[name])
    return result


def _step(milliseconds: float) -> int:
    """Returns a duration on a logarithmic scale with steps of 9 %."""
    return round(8 * math.log2(milliseconds + 1))


def _seconds(step: int) -> float:
    """Returns the duration of a step of that scale."""
    return (2 ** (step / 8) - 1) / 1000


def _place(view: RecordView) -> tuple[int, int]:
    """Returns a record's state, and the milliseconds at which that state began."""
    return STATES.index(view.state), round(view.since.timestamp() * 1000)


class RecordIndex:
    """The index, and the connections through which it and the pages read.

    Args:
        stores: the app's stores at the start; tasks added later may bring others.
    """

    def __init__(self, stores: Sequence[RecordStore]) -> None:
        self.stores = distinct(stores)
        #: For each store, the position in `stores` of the one that has the same records.
        self._numbers: dict[RecordStore, int] = {}
        self._readers: dict[RecordStore, RecordReader] = {}
        self._database = SqliteDatabase(":memory:", _SCHEMA)
        #: The rest of the current pass; None between two passes.
        self._pages: Iterator[tuple[RecordStore, list[RecordView]]] | None = None
        #: Number of the current pass, and of the records that it has read.
        self._pass = self._seen = 0
        #: Protects the attributes of the pass; held while `advance` reads records.
        self._passing = threading.RLock()
        #: When the current pass began (seconds of `monotonic`), and whether the last one was quick.
        self._began_at, self._is_quick = 0.0, False
        #: Until when the totals are cached (seconds of `monotonic`), and the totals.
        self._totals: tuple[float, dict[str, TaskTotals]] = -math.inf, {}
        #: When the last pass ended; None before the end of the first.
        self.finished_at: datetime | None = None
        #: Whether Redis has more records than `MAX_RECORDS`, so that some are missing here.
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
        self._database.write("DELETE FROM records WHERE id = ?", absent)
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
            ValueError: if the query is invalid.
        """
        counts = {task: found.states.total() for task, found in self.totals().items()}
        source, values = query.sql(counts)
        sql = f"SELECT store, task, digest, state, since FROM {source} LIMIT ? OFFSET ?"
        for _ in range(SELECTIONS):
            rows = self._database.read(sql, (*values, limit, offset))
            keys = self._keys(rows)
            found = {store: self.read(store, keys[store]) for store in keys}
            views = [
                found[self.stores[store]].get(Key(task, digest)) for store, task, digest, *_ in rows
            ]
            shown = [view for view in views if view is not None]
            if [row[3:] for row in rows] == [_place(view) for view in shown]:
                break
        return shown

    def started(self, limit: int) -> dict[RecordStore, list[Key]]:
        """Returns the keys of STARTED records by store, oldest first."""
        sql = "SELECT store, task, digest FROM records WHERE state = ? ORDER BY since LIMIT ?"
        return self._keys(self._database.read(sql, (STATES.index("STARTED"), limit)))

    def _keys(self, rows: Iterable[Sequence[Any]]) -> dict[RecordStore, list[Key]]:
        keys: dict[RecordStore, list[Key]] = defaultdict(list)
        for store, task, digest, *_ in rows:
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
        for task, state, duration, number in self._database.read(sql):
            found = totals[task]
            found.states[STATES[state]] += number
            if duration is not None:
                found.durations[duration] += number
        ended_at = time.monotonic()
        self._totals = ended_at + 20 * (ended_at - started_at), dict(totals)
        return self._totals[1]

    def advance(self, seconds: float) -> None:
        """Goes on with the current pass for about `seconds`, or begins one.

        Raises:
            StoreUnavailableError: if Redis does not reply. A new pass begins with the next call.
        """
        with self._passing:
            since = time.monotonic()
            pages, self._pages = self._pages, None
            if pages is None:
                self._began_at = since
                pages, self._pass, self._seen = self._scan(), self._pass + 1, 0
            for store, page in pages:
                self._add(store, page)
                self._seen += len(page)
                if self._seen > MAX_RECORDS:
                    break
                if time.monotonic() > since + seconds:
                    self._pages = pages
                    return
            self._database.write("DELETE FROM records WHERE pass < ?", [(self._pass,)])
            self._is_quick = time.monotonic() - self._began_at < QUICK
            self.full = self._seen > MAX_RECORDS
            self.finished_at = datetime.now(timezone.utc)

    def refresh(self) -> None:
        """Rereads all records, if the last pass was quick.

        Raises:
            StoreUnavailableError: if Redis does not reply.
        """
        requested_at = time.monotonic()
        if not self._is_quick:
            return
        with self._passing:
            if self._began_at < requested_at:
                self._pages = None
                self.advance(10 * QUICK)

    def _scan(self) -> Iterator[tuple[RecordStore, list[RecordView]]]:
        for store in self.stores:
            with self._reader(store) as reader:
                for page in reader.scan(expiry=False):
                    yield store, page

    def _add(self, store: RecordStore, views: Iterable[RecordView]) -> None:
        self._database.write(
            "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [self._row(store, view) for view in views],
        )

    def _row(self, store: RecordStore, view: RecordView) -> tuple[Any, ...]:
        """Returns the row of a record, in the order of the columns of `_SCHEMA`."""
        key, record = view.key, view.record
        attempt, label, duration = 0, "", None
        if record is not None:
            attempt, label = record.attempt, record.label
            if record.state.finished and not layout.is_poisoned(record):
                duration = _step(max(0, record.at_ms - record.token // 1000))
        return (
            self._id(store, key),
            self._number(store),
            key.task,
            key.digest,
            *_place(view),
            attempt,
            label.casefold(),
            "\n".join(word[:MAX_WORD] for word in words_of(view)).casefold(),
            duration,
            self._pass,
        )

    def _id(self, store: RecordStore, key: Key) -> int:
        return hash((self._number(store), str(key)))

    def _number(self, store: RecordStore) -> int:
        """Returns a store's number in `stores`, adding it if absent."""
        number = self._numbers.get(store)
        if number is None:
            self.stores = distinct([*self.stores, store])
            (number,) = (n for n, s in enumerate(self.stores) if location(s) == location(store))
            self._numbers[store] = number
        return number
