"""Counts records by task and state, a few at a time: a full scan would take minutes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone

from celery_idempotent.record.record import State
from celery_idempotent.store.inspection.record_query import RecordFilter, record_views
from celery_idempotent.store.inspection.record_reader import RecordView
from celery_idempotent.store.record_store import RecordStore


@dataclass
class Count:
    """The records that one pass over all stores has found."""

    by_task: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    #: When the pass ended; None while it goes on.
    finished_at: datetime | None = None

    @property
    def total(self) -> int:
        """Number of records."""
        return sum(sum(states.values()) for states in self.by_task.values())


class Census:
    """Passes over all records again and again, in steps of bounded time."""

    def __init__(self) -> None:
        #: The rest of a pass; None before its begin, and after an error, which ends it.
        self._pages: Iterator[list[RecordView]] | None = None
        self._running = Count()
        #: The last complete pass; before its end, the first one as far as it is.
        self.count = self._running

    def advance(self, stores: Iterable[RecordStore], seconds: float) -> list[RecordView]:
        """Scans for about `seconds`; returns the STARTED records on the way.

        Raises:
            StoreUnavailableError: if Redis does not reply.
        """
        end = time.monotonic() + seconds
        pages, self._pages = self._pages, None
        if pages is None:
            pages, self._running = record_views(stores, RecordFilter(), expiry=False), Count()
            if self.count.finished_at is None:
                self.count = self._running
        started: list[RecordView] = []
        for page in pages:
            for view in page:
                self._running.by_task[view.key.task][view.state] += 1
            started += [view for view in page if view.state == State.STARTED]
            if time.monotonic() > end:
                self._pages = pages
                return started
        self._running.finished_at = datetime.now(timezone.utc)
        self.count = self._running
        return started
