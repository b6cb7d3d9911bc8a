"""Requests leases and counters from the workers at intervals, and keeps what the overview shows.

A thread does that, from the first request on: every two seconds while the dashboard is open, and
every ten seconds otherwise, so that the charts have no gap.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

from celery import Celery

from celery_idempotent import doctor
from celery_idempotent.configuration import app_tasks
from celery_idempotent.dashboard.census import Census, Count
from celery_idempotent.dashboard.history import History
from celery_idempotent.doctor import Finding
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.key.key import Key
from celery_idempotent.monitoring import inspect_commands
from celery_idempotent.record.record import State
from celery_idempotent.sql.database import Database
from celery_idempotent.store.inspection.record_reader import RecordReader, RecordView
from celery_idempotent.store.inspection.scan import key_of
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

    @property
    def expired(self) -> int:
        """Number of `started` whose lease has expired."""
        return sum(view.is_expired for view in self.started)

    def totals(self) -> dict[str, Counter[str]]:
        """Returns the sum of the workers' counters by task."""
        totals: dict[str, Counter[str]] = defaultdict(Counter)
        for worker in self.workers:
            for task, counter in worker.counts.items():
                totals[task].update(counter)
        return dict(totals)


class Sampler:
    """Samples an app's workers and records. Its thread starts with the first request."""

    def __init__(self, app: Celery) -> None:
        self._app = app
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
        #: As old as the findings.
        self.sql_outcomes: list[SqlCount] = []
        self._findings: list[Finding] | None = None
        self._found_at = -FINDINGS_AGE
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

    def findings(self) -> list[Finding]:
        """Returns the findings of doctor, which are at most a minute old."""
        with self._findings_lock:
            if self._findings is None or self._are_findings_old():
                findings = doctor.examine(self._app, self._snapshot.totals())
                tasks = app_tasks.load(self._app)
                databases = {task.idempotency_configuration.settings.transaction for task in tasks}
                counts = [_count(database) for database in databases if database is not None]
                self.sql_outcomes = sorted(counts)
                self._findings, self._found_at = findings, time.monotonic()
            return self._findings

    def known_findings(self) -> list[Finding] | None:
        """Returns the last findings at once, and has them determined anew if they are old."""
        if self._are_findings_old() and not self._findings_lock.locked():
            threading.Thread(target=self.findings, daemon=True).start()
        return self._findings

    def _are_findings_old(self) -> bool:
        return time.monotonic() - self._found_at > FINDINGS_AGE

    def _run(self) -> None:
        # A process that was forked must not use its parent's connections.
        census = Census()
        self._closed = False
        while not self._closed:
            try:
                self._snapshot = self._sample(census)
            except Exception:
                logger.exception("The dashboard cannot be updated")
            self._first.set()
            idle = time.monotonic() - self._requested_at > IDLE_AFTER
            self._wake.wait(IDLE_INTERVAL if idle else INTERVAL)
            self._wake.clear()

    def _sample(self, census: Census) -> Snapshot:
        workers = self._snapshot.workers
        now = time.monotonic()
        if now - self._asked_at >= WORKER_INTERVAL:
            self._asked_at = now
            workers = self._ask_workers()
            self.history.add(now, {worker.name: worker.counts for worker in workers})
        error, started = "", []
        try:
            stores = app_tasks.stores(app_tasks.load(self._app))
            found = census.advance(stores, CENSUS_SECONDS)
            self._follow((view.store, view.key) for view in found)
            # A worker replies with the task and its digest; prefixes may differ.
            texts = {lease["key"] for worker in workers for lease in worker.leases}
            named = ((store, key_of(t, store.config.prefix)) for store in stores for t in texts)
            self._follow((store, key) for store, key in named if key is not None)
            started = self._read_followed(stores)
        except IdempotencyError as exception:
            error = str(exception)
        return Snapshot(workers=workers, started=tuple(started), records=census.count, error=error)

    def _ask_workers(self) -> tuple[Worker, ...]:
        ask = partial(inspect_commands.ask, self._app, timeout=WORKER_TIMEOUT)
        with ThreadPoolExecutor() as pool:
            leases, counts = pool.map(ask, ("idempotency_leases", "idempotency_counts"))
        now = time.monotonic()
        known = {w.name: w for w in self._snapshot.workers if now - w.replied_at < WORKER_GRACE}
        # A worker that has replied to both commands replaces what is known of it.
        replied = leases.keys() & counts.keys()
        workers = known | {name: _worker(name, leases[name], counts[name], now) for name in replied}
        return tuple(workers[name] for name in sorted(workers))

    def _follow(self, keys: Iterable[tuple[RecordStore, Key]]) -> None:
        for key in keys:
            if len(self._followed) < MAX_FOLLOWED:
                self._followed[key] = None

    def _read_followed(self, stores: Iterable[RecordStore]) -> list[RecordView]:
        """Returns the STARTED ones. No longer follows those that are finished or absent."""
        views: list[RecordView] = []
        for store in stores:
            keys = [key for owner, key in self._followed if owner is store]
            if not keys:
                continue
            with RecordReader.open(store, READ_TIMEOUT) as reader:
                found = reader.get(keys)
            for key in keys:
                view = found.get(key)
                if view is None or view.state not in (State.RESERVED, State.STARTED):
                    del self._followed[store, key]
                elif view.state == State.STARTED:
                    views.append(view)
        return sorted(views, key=lambda view: (not view.is_expired, view.version))


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
