"""Requests leases and counters from the workers at intervals, and keeps what the overview shows.

A thread does that, from the first request on: every two seconds while the dashboard is open, and
every ten seconds otherwise, so that the charts have no gap.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

from celery import Celery

from celery_idempotent import doctor
from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.dashboard.census import Census, Count
from celery_idempotent.dashboard.history import History
from celery_idempotent.doctor import Finding
from celery_idempotent.errors import CorruptRecordError, IdempotencyError
from celery_idempotent.key.key import Key
from celery_idempotent.monitoring import inspect_commands
from celery_idempotent.record.record import Record, State
from celery_idempotent.sql.database import Database
from celery_idempotent.store.inspection.record_query import RecordView
from celery_idempotent.store.inspection.record_reader import RecordReader
from celery_idempotent.store.inspection.scan import ScannedRecord
from celery_idempotent.store.record_store import RecordStore

logger = logging.getLogger(__name__)

#: Seconds between two rounds: while pages are open, and otherwise.
INTERVAL, IDLE_INTERVAL = 1.0, 10.0
#: Seconds between two requests to the workers, and for their replies.
WORKER_INTERVAL, WORKER_TIMEOUT = 2.0, 0.5
#: Seconds for which a worker that does not reply is shown as it was: a busy one replies late.
WORKER_GRACE = 10.0
#: Seconds after the last request until no page counts as open.
IDLE_AFTER = 60.0
#: Seconds of each round that are spent on counting records.
CENSUS_SECONDS = 0.05
#: Seconds that Redis may take to reply.
READ_TIMEOUT = 2.0
#: Unfinished records that are followed.
MAX_FOLLOWED = 200
#: Seconds after which the findings are determined anew.
FINDINGS_AGE = 60.0


@dataclass(frozen=True)
class Worker:
    """What a worker has replied."""

    name: str
    leases: list[dict[str, Any]]
    #: Counters by task.
    counts: dict[str, dict[str, int]]
    #: Why its leases are unknown; empty if they are known.
    error: str = ""
    #: When it replied, on a monotonic clock.
    replied_at: float = 0.0


class SqlCount(NamedTuple):
    """How many outcomes a database has."""

    name: str
    rows: int = 0
    expired: int = 0
    #: Why they could not be counted; empty if they were.
    error: str = ""


@dataclass(frozen=True)
class Snapshot:
    """What is known now."""

    taken_at: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    workers: tuple[Worker, ...] = ()
    #: STARTED records, those whose lease has expired first, then the oldest first.
    started: tuple[RecordView, ...] = ()
    records: Count = field(default_factory=Count)
    #: Why records could not be read; empty if they could.
    error: str = ""
    #: Grows with each round.
    version: int = 0

    @property
    def expired(self) -> int:
        """Number of `started` whose lease has expired."""
        return sum(_is_expired(view) for view in self.started)

    def totals(self) -> dict[str, Counter[str]]:
        """Returns the sum of the workers' counters by task."""
        totals: dict[str, Counter[str]] = defaultdict(Counter)
        for worker in self.workers:
            for task, counter in worker.counts.items():
                totals[task].update(counter)
        return dict(totals)


class Sampler:
    """Samples an app's workers and records. Its thread starts with the first request."""

    def __init__(self, app: Celery, tasks: Sequence[IdempotentTaskLike]) -> None:
        self._app = app
        self._stores = app_tasks.stores(tasks)
        self._census = Census()
        self._readers: dict[RecordStore, RecordReader] = {}
        self._followed: dict[tuple[RecordStore, Key], None] = {}
        self._asked_at = -WORKER_INTERVAL
        self._wake = threading.Event()
        self._first = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._requested_at = 0.0
        self._snapshot = Snapshot()
        self.history = History()
        databases = {task.idempotency_configuration.settings.transaction for task in tasks}
        self._databases = sorted(databases - {None}, key=lambda database: database.engine.name)
        #: As old as the findings.
        self.sql_outcomes: list[SqlCount] = []
        self._findings: tuple[float, list[Finding]] | None = None
        self._findings_lock = threading.Lock()

    def snapshot(self) -> Snapshot:
        """Returns what is known, without waiting for a server except the first time."""
        idle = time.monotonic() - self._requested_at > IDLE_AFTER
        self._requested_at = time.monotonic()
        with self._lock:
            # A process that was forked has no threads of its parent.
            if self._thread is None or not self._thread.is_alive():
                self._first.clear()
                self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)
                self._thread.start()
        if idle:
            self._wake.set()
        self._first.wait(WORKER_TIMEOUT + 1)
        return self._snapshot

    def close(self) -> None:
        """Ends the thread; the next request would start another one."""
        self._closed = True
        self._wake.set()

    def now(self) -> float:
        """Returns the time on the clock of `history`."""
        return time.monotonic()

    def findings(self) -> list[Finding]:
        """Returns the findings of doctor, which are at most a minute old."""
        with self._findings_lock:
            if self._findings is None or time.monotonic() - self._findings[0] > FINDINGS_AGE:
                findings = doctor.examine(self._app, self._snapshot.totals())
                self.sql_outcomes = [_count(database) for database in self._databases]
                self._findings = time.monotonic(), findings
            return self._findings[1]

    def known_findings(self) -> list[Finding] | None:
        """Returns the last findings at once, and has them determined anew if they are old."""
        known = self._findings
        if known is None or time.monotonic() - known[0] > FINDINGS_AGE:
            threading.Thread(target=self._refresh_findings, daemon=True).start()
        return None if known is None else known[1]

    def _refresh_findings(self) -> None:
        if not self._findings_lock.locked():
            self.findings()

    def _run(self) -> None:
        # A process that was forked must not use its parent's connections.
        self._readers = {}
        self._closed = False
        while not self._closed:
            try:
                self._snapshot = self._sample()
            except Exception:
                logger.exception("The dashboard cannot be updated")
            self._first.set()
            idle = time.monotonic() - self._requested_at > IDLE_AFTER
            self._wake.wait(IDLE_INTERVAL if idle else INTERVAL)
            self._wake.clear()
        for reader in self._readers.values():
            reader.close()

    def _sample(self) -> Snapshot:
        workers = self._snapshot.workers
        now = time.monotonic()
        if now - self._asked_at >= WORKER_INTERVAL:
            self._asked_at = now
            workers = self._ask_workers()
            self.history.add(now, {worker.name: worker.counts for worker in workers})
        error = ""
        try:
            for store in self._stores:
                if store not in self._readers:
                    self._readers[store] = store.open_reader(READ_TIMEOUT)
            self._follow(self._census.advance(self._readers, CENSUS_SECONDS))
            self._follow(self._held_keys(workers))
            started = self._read_followed()
        except IdempotencyError as exception:
            error, started = str(exception), []
        return Snapshot(
            workers=workers,
            started=tuple(started),
            records=self._census.count,
            error=error,
            version=self._snapshot.version + 1,
        )

    def _ask_workers(self) -> tuple[Worker, ...]:
        replies: dict[str, dict[str, Any]] = {}

        def ask(command: str) -> None:
            replies[command] = inspect_commands.ask(self._app, command, WORKER_TIMEOUT)

        threads = [threading.Thread(target=ask, args=(name,)) for name in _COMMANDS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        leases, counts = (replies.get(command, {}) for command in _COMMANDS)
        now = time.monotonic()
        known = {w.name: w for w in self._snapshot.workers if now - w.replied_at < WORKER_GRACE}
        # A worker that has replied to both commands replaces what is known of it.
        replied = leases.keys() & counts.keys()
        workers = known | {name: _worker(name, leases[name], counts[name], now) for name in replied}
        return tuple(workers[name] for name in sorted(workers))

    def _held_keys(self, workers: Sequence[Worker]) -> list[tuple[RecordStore, Key]]:
        """Returns the keys of the leases that the workers hold, for each store that may have them.

        A worker replies with the task and its digest; prefixes may differ.
        """
        texts = {lease["key"] for worker in workers for lease in worker.leases}
        keys = [
            (reader.key_of(text), store)
            for store, reader in self._readers.items()
            for text in texts
        ]
        return [(store, key) for key, store in keys if key is not None]

    def _follow(self, keys: Sequence[tuple[RecordStore, Key]]) -> None:
        for key in keys:
            if len(self._followed) < MAX_FOLLOWED:
                self._followed[key] = None

    def _read_followed(self) -> list[RecordView]:
        """Returns the STARTED ones. No longer follows those that are finished or absent."""
        views: list[RecordView] = []
        for store, reader in self._readers.items():
            keys = [key for owner, key in self._followed if owner is store]
            found = reader.get(keys)
            for key in keys:
                record = _record(reader, found.get(key))
                if record is None or record.state.finished:
                    del self._followed[store, key]
                elif record.state is State.STARTED:
                    views.append(RecordView(key, record, found[key].now, store))
        return sorted(views, key=_order)


def _record(reader: RecordReader, scanned: ScannedRecord | None) -> Record | None:
    if scanned is None:
        return None
    try:
        return reader.read(scanned)
    except CorruptRecordError:
        return None


_COMMANDS = ("idempotency_leases", "idempotency_counts")


def _count(database: Database) -> SqlCount:
    name = database.engine.name
    try:
        return SqlCount(name, *database.count())
    except IdempotencyError as error:
        return SqlCount(name, error=str(error))


def _worker(name: str, leases: Any, counts: Any, now: float) -> Worker:
    error = leases.get("error", "") if isinstance(leases, Mapping) else ""
    return Worker(
        name,
        leases if isinstance(leases, list) else [],
        counts if isinstance(counts, dict) and "error" not in counts else {},
        error,
        now,
    )


def _is_expired(view: RecordView) -> bool:
    deadline = None if view.record is None else view.record.deadline
    return deadline is not None and deadline <= view.now


def _order(view: RecordView) -> tuple[bool, int]:
    assert view.record is not None
    return not _is_expired(view), view.record.token
