"""All records, chosen by state, task and age."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import Record, State
from celery_idempotent.store.record_store import RecordStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which records are wanted; None takes all."""

    state: State | None = None
    task: str | None = None
    #: Since the outcome, or since the beginning where there is none yet.
    older_than: timedelta | None = None

    def matches(self, record: Record, now: datetime) -> bool:
        """Whether `record` is one of them; its task was asked for in the scan."""
        if self.state is not None and record.state is not self.state:
            return False
        return self.older_than is None or now - since(record) > self.older_than


@dataclass(frozen=True, slots=True)
class RecordView:
    """A record as it was seen."""

    key: Key
    #: None where it cannot be read.
    record: Record | None
    #: By the clock of its server.
    now: datetime
    store: RecordStore


def since(record: Record) -> datetime:
    """When it came into its present state: its token is a time until there is an outcome."""
    return record.finished_at or datetime.fromtimestamp(record.token / 1e6, tz=timezone.utc)


def record_views(
    stores: Iterable[RecordStore], record_filter: RecordFilter, *, expiry: bool = True
) -> Iterator[list[RecordView]]:
    """The records in `stores`, a page at a time, even an empty one; unreadable ones too, unless
    the choice is by state or age.

    Raises:
        StoreUnavailableError: if a Redis cannot be asked.
    """
    for store in stores:
        with store.open_reader() as open_reader:
            for page in open_reader.scan(record_filter.task, expiry=expiry):
                seen = []
                for found in page:
                    try:
                        record = open_reader.read(found)
                    except CorruptRecordError:
                        if record_filter.state is None and record_filter.older_than is None:
                            seen.append(RecordView(found.key, None, found.now, store))
                        continue
                    if record_filter.matches(record, found.now):
                        seen.append(RecordView(found.key, record, found.now, store))
                yield seen


def records(
    stores: Iterable[RecordStore],
    *,
    state: State | str | None = None,
    task: str | None = None,
    older_than: timedelta | float | None = None,
) -> Iterator[Record]:
    """The records in `stores`, as they are come by: SCAN, on every node of a Cluster, never KEYS.

    A result is decoded, and a large one fetched, when `Record.result` is asked for it. What cannot
    be read is left out, with a warning.

    Args:
        state: only records in this state.
        task: only records of this task, by name.
        older_than: only records that came into their state longer ago (seconds, or a timedelta).

    Raises:
        StoreUnavailableError: if a Redis cannot be asked.
    """
    if older_than is not None and not isinstance(older_than, timedelta):
        older_than = timedelta(seconds=older_than)
    record_filter = RecordFilter(None if state is None else State(state), task, older_than)
    for page in record_views(stores, record_filter):
        for record_view in page:
            if record_view.record is None:
                logger.warning("The record of %s cannot be read", record_view.key)
            else:
                yield record_view.record
