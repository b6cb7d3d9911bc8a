"""The thread that updates the index of records, polls the workers, and keeps the overview's data.

While the dashboard is open in a browser, it reads records every second and polls the workers every
two. Otherwise it only polls the workers, every ten seconds, to leave no gap in the charts.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from datetime import datetime, timezone
from typing import NamedTuple

from celery import Celery

from celery_idempotent import sql
from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.record import State
from celery_idempotent.core.store.scan import key_of
from celery_idempotent.dashboard.history import History
from celery_idempotent.dashboard.index import RecordIndex, TaskTotals, bounded
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.operations import doctor
from celery_idempotent.operations.doctor import Finding
from celery_idempotent.operations.records.reader import RecordView
from celery_idempotent.operations.worker import inspect_commands
from celery_idempotent.operations.worker.inspect_commands import Replies
from celery_idempotent.sql.database import Database

logger = logging.getLogger(__name__)

#: Seconds between two rounds: while pages are open, and otherwise.
INTERVAL, IDLE_INTERVAL = 1.0, 10.0
#: Seconds between two rounds until all records have been read once.
FIRST_INTERVAL = 0.25
#: Seconds between two requests to the workers, and for replies.
WORKER_INTERVAL, WORKER_TIMEOUT = 2.0, 0.5
#: Seconds that the first request waits for the first round.
FIRST_TIMEOUT = 5.0
#: Seconds for which a silent worker keeps its last reply: a busy one replies late.
WORKER_GRACE = 10.0
#: Seconds after the last request when the dashboard becomes idle.
IDLE_AFTER = 60.0
#: Seconds spent reading records per round: until all have been read once, and later.
FIRST_SECONDS, LATER_SECONDS = 0.5, 0.15
#: Maximum running executions read per round, besides those that the workers report.
MAX_STARTED = 200
#: Seconds after which the findings are refreshed.
FINDINGS_AGE = 15.0


class SqlCount(NamedTuple):
    """The number of outcomes in a database."""

    name: str
    rows: int = 0
    expired: int = 0
    #: Why counting failed; empty if it succeeded.
    error: str = ""


class Sampler(threading.Thread):
    """Samples an app's workers and records.

    Args:
        history: the history file; empty for memory only.
    """

    def __init__(self, app: Celery, history: str) -> None:
        super().__init__(name="dashboard", daemon=True)
        self._app = app
        #: The workers' counts over time.
        self.history = History(history or ":memory:")
        #: The records.
        self.index = RecordIndex(app_tasks.stores(app_tasks.load(app)))
        #: The workers' last replies, in the order of their names.
        self.replies = Replies({})
        #: Whether the workers were polled; the first page shows records before that.
        self.asked = False
        #: STARTED records: those with an expired lease first, then oldest first.
        self.running: list[RecordView] = []
        #: The totals by name of the task, for a bounded number of names (`bounded`).
        self.records: dict[str, TaskTotals] = {}
        #: The totals of the index from which `records` was made.
        self._totals: dict[str, TaskTotals] | None = None
        #: When records were last read; None before the first time.
        self.read_at: datetime | None = None
        #: Why the last read failed (the earlier records stay); empty if it succeeded.
        self.error = ""
        #: When a page was last requested, and when the workers were last polled.
        self._requested_at, self._asked_at = time.monotonic(), -math.inf
        #: When each worker last replied.
        self._replied_at: dict[str, float] = {}
        self._closed = False
        #: Ends the pause between two rounds.
        self._wake = threading.Event()
        #: Set once the first round has read the records, and once it has polled the workers.
        self._read, self._asked = threading.Event(), threading.Event()
        #: The outcomes in the databases of transactions; counted together with the findings.
        self.sql_outcomes: list[SqlCount] = []
        #: The last findings, and when they were computed; None before the first time.
        self._findings: list[Finding] | None = None
        self._found_at = -math.inf
        self._findings_lock = threading.Lock()

    @property
    def total(self) -> int:
        """Number of records."""
        return sum(found.states.total() for found in self.records.values())

    def wait(self, *, asked: bool = False) -> Sampler:
        """Waits for the first round; returns this sampler, which then has something to show.

        Args:
            asked: whether to also wait for the workers' replies.
        """
        idle = self._is_idle()
        self._requested_at = time.monotonic()
        if idle:
            self._wake.set()
        (self._asked if asked else self._read).wait(FIRST_TIMEOUT)
        return self

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._wake.set()

    def findings(self) -> list[Finding]:
        """Returns doctor's findings, at most `FINDINGS_AGE` old."""
        with self._findings_lock:
            if self._findings is None or self._are_findings_old():
                replies = self.wait(asked=True).replies
                self._findings = doctor.check_all(self._app, replies.totals, replies.leases)
                databases = sql.databases(app_tasks.load(self._app))
                self.sql_outcomes = sorted(map(_count, databases))
                self._found_at = time.monotonic()
            return self._findings

    def known_findings(self) -> list[Finding] | None:
        """Returns the last findings at once; refreshes old ones in the background."""
        if self._are_findings_old() and not self._findings_lock.locked():
            threading.Thread(target=self.findings, daemon=True).start()
        return self._findings

    def _are_findings_old(self) -> bool:
        return time.monotonic() - self._found_at > FINDINGS_AGE

    def _is_idle(self) -> bool:
        return time.monotonic() - self._requested_at > IDLE_AFTER

    def run(self) -> None:
        """Updates the data until the sampler is closed."""
        while not self._closed:
            idle = self._is_idle()
            try:
                if not idle:
                    self._read_records()
                # Most pages wait only for the records: the replies of workers take much longer.
                self._read.set()
                if time.monotonic() - self._asked_at >= WORKER_INTERVAL:
                    self._ask_workers()
            except Exception:
                logger.exception("The dashboard cannot be updated")
            self._read.set()
            self._asked.set()
            is_new = self.index.finished_at is None
            self._wake.wait(IDLE_INTERVAL if idle else FIRST_INTERVAL if is_new else INTERVAL)
            self._wake.clear()
        self.index.close()

    def _read_records(self) -> None:
        index, read_at = self.index, datetime.now(timezone.utc)
        try:
            index.advance(FIRST_SECONDS if index.finished_at is None else LATER_SECONDS)
            self.running, totals = self._read_running(), index.totals()
            if totals is not self._totals:
                known = {task.name for task in app_tasks.load(self._app)}
                self._totals, self.records = totals, bounded(totals, known)
            self.error, self.read_at = "", read_at
        except IdempotencyError as error:
            self.error = str(error)

    def _ask_workers(self) -> None:
        self._asked_at = now = time.monotonic()
        replies = inspect_commands.ask(self._app, WORKER_TIMEOUT)
        replied_at = self._replied_at | dict.fromkeys(replies.workers, now)
        self._replied_at = {n: at for n, at in replied_at.items() if now - at < WORKER_GRACE}
        known = self.replies.workers | replies.workers
        workers = {name: known[name] for name in sorted(self._replied_at)}
        self.history.add(time.time(), {name: each.counts for name, each in workers.items()})
        self.replies, self.asked = replies._replace(workers=workers), True

    def _read_running(self) -> list[RecordView]:
        """Returns the STARTED records from the index and the workers' leases."""
        index = self.index
        keys = index.started(MAX_STARTED)
        for store in index.stores:
            # The key in a worker's reply has no prefix, so it may belong to any store.
            named = (key_of(lease["key"], store.config.prefix) for lease in self.replies.leases)
            keys[store] += [key for key in named if key is not None and key not in keys[store]]
        views = [view for store in keys for view in index.read(store, keys[store]).values()]
        running = [view for view in views if view.state == State.STARTED]
        return sorted(running, key=lambda view: (not view.is_expired, view.version))


def _count(database: Database) -> SqlCount:
    name = database.engine.name
    try:
        return SqlCount(name, *database.count())
    except IdempotencyError as error:
        return SqlCount(name, error=str(error))
