"""Keeps the index of records, asks the workers at intervals, and keeps what the overview shows.

A thread does that, from the first request on: every second while the dashboard is open. Otherwise
it asks the workers every ten seconds, so that the charts have no gap, and leaves Redis alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, NamedTuple

from celery import Celery

from celery_idempotent import doctor
from celery_idempotent.configuration import app_tasks
from celery_idempotent.dashboard.history import History
from celery_idempotent.dashboard.index import RecordIndex, TaskTotals
from celery_idempotent.doctor import Finding
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.monitoring import inspect_commands
from celery_idempotent.monitoring.inspect_commands import Replies
from celery_idempotent.record.record import State
from celery_idempotent.sql.database import Database
from celery_idempotent.store.inspection.record_reader import RecordView
from celery_idempotent.store.inspection.scan import key_of

logger = logging.getLogger(__name__)

#: Seconds between two rounds: while pages are open, and otherwise.
INTERVAL, IDLE_INTERVAL = 1.0, 10.0
#: The same until all records were read once.
FIRST_INTERVAL = 0.25
#: Seconds between two requests to the workers, and for their replies.
WORKER_INTERVAL, WORKER_TIMEOUT = 2.0, 0.5
#: Seconds that the first request waits for the first round.
FIRST_TIMEOUT = 5.0
#: Seconds for which a worker that does not reply is shown as it was: a busy one replies late.
WORKER_GRACE = 10.0
#: Seconds after the last request until no page counts as open.
IDLE_AFTER = 60.0
#: Seconds of each round that are spent on reading records: until all were read once, and later.
FIRST_SECONDS, LATER_SECONDS = 0.5, 0.15
#: Running executions that are shown, and read in each round.
MAX_STARTED = 200
#: Seconds after which the findings are determined anew.
FINDINGS_AGE = 15.0


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
    #: What it keeps from redelivery.
    redelivery: dict[str, Any] = field(default_factory=dict)


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
    #: Whether the workers were asked: records are read first.
    asked: bool = False
    #: Why no worker has replied; empty if one has.
    workers_error: str = ""
    #: STARTED records, those whose lease has expired first, then the oldest first.
    started: tuple[RecordView, ...] = ()
    records: dict[str, TaskTotals] = field(default_factory=dict)
    #: When each record was last counted; None while the first count goes on.
    counted_at: datetime | None = None
    #: Why records could not be read; empty if they could. The records are those before.
    error: str = ""
    #: When records were read.
    read_at: datetime | None = None

    @property
    def expired(self) -> int:
        """Number of `started` whose lease has expired."""
        return sum(view.is_expired for view in self.started)

    @property
    def total(self) -> int:
        """Number of records."""
        return sum(found.states.total() for found in self.records.values())

    @property
    def leases(self) -> list[dict[str, Any]]:
        """The leases of all workers."""
        return [lease for worker in self.workers for lease in worker.leases]

    def totals(self) -> dict[str, Counter[str]]:
        """Returns the sum of the workers' counters by task."""
        totals: dict[str, Counter[str]] = defaultdict(Counter)
        for worker in self.workers:
            for task, counter in worker.counts.items():
                totals[task].update(counter)
        return dict(totals)


class Sampler:
    """Samples an app's workers and records. Its thread starts with the first request.

    Args:
        history: the file of the history; empty for none.
    """

    def __init__(self, app: Celery, history: str) -> None:
        self._app = app
        self._asked_at = -WORKER_INTERVAL
        self._wake = threading.Event()
        #: Set after the first round: when records were read, and when the workers were asked.
        self._read, self._asked = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._requested_at = 0.0
        self._snapshot = Snapshot()
        self._file = history
        self._history: History | None = None
        self._index: RecordIndex | None = None
        #: As old as the findings.
        self.sql_outcomes: list[SqlCount] = []
        self._findings: list[Finding] | None = None
        self._found_at = -FINDINGS_AGE
        self._findings_lock = threading.Lock()

    @property
    def index(self) -> RecordIndex:
        """The records."""
        self.snapshot()
        assert self._index is not None
        return self._index

    @property
    def history(self) -> History:
        """What the workers have counted."""
        self.snapshot()
        assert self._history is not None
        return self._history

    def snapshot(self, *, asked: bool = False) -> Snapshot:
        """Returns what is known, without waiting for a server except the first time.

        Args:
            asked: wait then until the workers were asked, too.
        """
        idle = time.monotonic() - self._requested_at > IDLE_AFTER
        self._requested_at = time.monotonic()
        if self._closed:
            return self._snapshot
        with self._lock:
            # A process that was forked has no threads of its parent, and must not use its files
            # and connections.
            if self._thread is None or not self._thread.is_alive():
                self._read.clear()
                self._asked.clear()
                self._history = History(self._file or ":memory:")
                self._index = RecordIndex(app_tasks.stores(app_tasks.load(self._app)))
                self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)
                self._thread.start()
        if idle:
            self._wake.set()
        (self._asked if asked else self._read).wait(FIRST_TIMEOUT)
        return self._snapshot

    def close(self) -> None:
        """Ends the thread, for good."""
        self._closed = True
        self._wake.set()

    def warm_up(self) -> None:
        """Determines what the first request would wait for."""
        self.snapshot()
        self.known_findings()

    def findings(self) -> list[Finding]:
        """Returns the findings of doctor, which are a few seconds old at most."""
        with self._findings_lock:
            if self._findings is None or self._are_findings_old():
                snapshot = self.snapshot(asked=True)
                findings = doctor.examine(self._app, snapshot.totals(), snapshot.leases)
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
        while not self._closed:
            idle = time.monotonic() - self._requested_at > IDLE_AFTER
            try:
                self._sample(idle)
            except Exception:
                logger.exception("The dashboard cannot be updated")
            self._read.set()
            self._asked.set()
            is_new = self._index is not None and self._index.finished_at is None
            self._wake.wait(IDLE_INTERVAL if idle else FIRST_INTERVAL if is_new else INTERVAL)
            self._wake.clear()
        assert self._index is not None
        self._index.close()

    def _sample(self, idle: bool) -> None:
        if not idle:
            self._read_records()
        # A page need not wait for the workers, which take much longer.
        self._read.set()
        now = time.monotonic()
        if now - self._asked_at >= WORKER_INTERVAL:
            self._asked_at = now
            self._ask_workers(now)

    def _read_records(self) -> None:
        index, snapshot = self._index, self._snapshot
        assert index is not None
        taken_at = datetime.now(timezone.utc)
        try:
            index.advance(FIRST_SECONDS if index.finished_at is None else LATER_SECONDS)
            started = self._read_started(index, snapshot)
            snapshot = replace(
                snapshot,
                started=tuple(started),
                records=index.totals(),
                counted_at=index.finished_at,
                error="",
                read_at=taken_at,
            )
        except IdempotencyError as error:
            snapshot = replace(snapshot, error=str(error))
        self._snapshot = replace(snapshot, taken_at=taken_at)

    def _ask_workers(self, now: float) -> None:
        assert self._history is not None
        replies = inspect_commands.ask(self._app, WORKER_TIMEOUT)
        known = {w.name: w for w in self._snapshot.workers if now - w.replied_at < WORKER_GRACE}
        # A worker that has replied to both commands replaces what is known of it.
        known |= {
            name: _worker(name, replies, time.monotonic())
            for name in replies.leases.keys() & replies.counts.keys()
        }
        workers = tuple(known[name] for name in sorted(known))
        self._history.add(time.time(), {worker.name: worker.counts for worker in workers})
        self._snapshot = replace(
            self._snapshot, workers=workers, asked=True, workers_error=replies.error
        )

    def _read_started(self, index: RecordIndex, snapshot: Snapshot) -> list[RecordView]:
        """Returns the STARTED records, of the index and of the workers' leases."""
        keys = index.started(MAX_STARTED)
        for store in index.stores:
            # A worker replies with the task and its digest; prefixes may differ.
            named = (key_of(lease["key"], store.config.prefix) for lease in snapshot.leases)
            keys[store] += [key for key in named if key is not None and key not in keys[store]]
        views = [view for store in keys for view in index.read(store, keys[store]).values()]
        started = [view for view in views if view.state == State.STARTED]
        return sorted(started, key=lambda view: (not view.is_expired, view.version))


def _count(database: Database) -> SqlCount:
    name = database.engine.name
    try:
        return SqlCount(name, *database.count())
    except IdempotencyError as error:
        return SqlCount(name, error=str(error))


def _worker(name: str, replies: Replies, now: float) -> Worker:
    leases, counts = replies.leases[name], replies.counts[name]
    redelivery = replies.redelivery.get(name)
    error = leases.get("error", "") if isinstance(leases, dict) else ""
    return Worker(
        name,
        leases if isinstance(leases, list) else [],
        counts if isinstance(counts, dict) and "error" not in counts else {},
        error,
        now,
        # A worker of an earlier version does not know the command.
        redelivery if isinstance(redelivery, dict) and "messages_held" in redelivery else {},
    )
