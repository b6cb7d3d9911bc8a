"""Counts records by task and state, a few at a time: a full scan would take minutes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone

from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import State
from celery_idempotent.store.inspection.record_reader import START, Position, RecordReader
from celery_idempotent.store.inspection.scan import ScannedRecord
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
        self._running = Count()
        self._store = 0
        self._position: Position = START
        #: The last complete pass; before its end, the first one as far as it is.
        self.count = self._running

    def advance(
        self, readers: Mapping[RecordStore, RecordReader], seconds: float
    ) -> list[tuple[RecordStore, Key]]:
        """Scans for about `seconds`; returns the keys of the STARTED records on the way.

        Raises:
            StoreUnavailableError: if Redis does not reply.
        """
        end = time.monotonic() + seconds
        started: list[tuple[RecordStore, Key]] = []
        for store, reader in list(readers.items())[self._store :]:
            for following, page in reader.scan_from(self._position, expiry=False):
                for scanned in page:
                    state = _state(reader, scanned)
                    self._running.by_task[scanned.key.task][state] += 1
                    if state == State.STARTED:
                        started.append((store, scanned.key))
                self._position = following or START
                if following is not None and time.monotonic() > end:
                    return started
            self._store += 1
        self._running.finished_at = datetime.now(timezone.utc)
        self.count = self._running
        self._running, self._store = Count(), 0
        return started


def _state(reader: RecordReader, scanned: ScannedRecord) -> str:
    try:
        return reader.read(scanned).state.value
    except CorruptRecordError:
        return "CORRUPT"
