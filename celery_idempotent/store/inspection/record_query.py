"""Finds records by state, task and age."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.events.report import log_extra
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import Record, State
from celery_idempotent.store.inspection.record_reader import START, RecordReader
from celery_idempotent.store.inspection.scan import ScannedRecord
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.reference import Reference

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which records to return; a field that is None matches all."""

    state: State | None = None
    task: str | None = None
    #: Time since the outcome, or since the begin if there is no outcome yet.
    older_than: timedelta | None = None
    #: Id of the task that holds the key, or stored the outcome.
    task_id: str | None = None
    #: A part of the label, in upper or lower case.
    label: str | None = None

    @property
    def needs_record(self) -> bool:
        """Whether a record that cannot be read does not match."""
        return any(
            condition is not None
            for condition in (self.state, self.older_than, self.task_id, self.label)
        )

    def matches(self, record: Record, now: datetime) -> bool:
        """Returns whether all but the task match, which the scan has selected."""
        if self.state is not None and record.state is not self.state:
            return False
        if self.task_id is not None and record.task_id != self.task_id:
            return False
        if self.label is not None and self.label.casefold() not in record.label.casefold():
            return False
        return self.older_than is None or now - since(record) > self.older_than


@dataclass(frozen=True, slots=True)
class RecordView:
    """A record as it was read."""

    key: Key
    #: None if it cannot be read.
    record: Record | None
    #: The time on its server.
    now: datetime
    store: RecordStore
    #: How the duplicate met it by whose task id the record was found.
    reference: Reference | None = None


def since(record: Record) -> datetime:
    """Returns when the record entered its state; without an outcome, its token is a time."""
    return record.finished_at or datetime.fromtimestamp(record.token / 1e6, tz=timezone.utc)


def read_view(store: RecordStore, key: Key, *, whole: bool = False) -> RecordView | None:
    """Reads the record of `key`; None if it is absent.

    Args:
        whole: also read what a scan leaves out of a long record: its finished steps.
    """
    with store.open_reader() as reader:
        found = reader.get([key], whole=whole).get(key)
        if found is None:
            return None
        try:
            record = reader.read(found)
        except CorruptRecordError:
            record = None
        return RecordView(key, record, found.now, store)


def record_views(
    stores: Iterable[RecordStore], record_filter: RecordFilter, *, expiry: bool = True
) -> Iterator[list[RecordView]]:
    """Returns the records in pages, which may be empty.

    Records that cannot be read are included, unless the filter is by more than the task.

    Raises:
        StoreUnavailableError: if Redis does not reply.
    """
    for store in stores:
        with store.open_reader() as reader:
            for page in reader.scan(record_filter.task, expiry=expiry):
                yield list(_matching(page, reader, store, record_filter))


class RecordPage(NamedTuple):
    """Some of the records that a filter selects."""

    views: list[RecordView]
    #: Where the next page begins, for :func:`record_page`; empty after the last one.
    cursor: str


#: The beginning: store, primary and cursor of SCAN.
_FIRST = "0.0.0"
_CURSOR = re.compile(r"\d{1,4}\.\d{1,4}\.\d{1,20}")


def record_page(
    stores: Sequence[RecordStore],
    record_filter: RecordFilter,
    cursor: str = "",
    *,
    limit: int = 50,
    seconds: float = 0.25,
) -> RecordPage:
    """Returns about `limit` records and the cursor of the next page, after a scan of bounded time.

    A page may have fewer records, or none, before the last one: records are not indexed, so a scan
    ends when its time is over. As SCAN documents, a record may be on two pages.

    Args:
        cursor: of the previous page; empty for the first one.
        limit: pages may have a few more.
        seconds: after which no further records are scanned.

    Raises:
        ValueError: if `cursor` is not a cursor.
        StoreUnavailableError: if Redis does not reply.
    """
    if not _CURSOR.fullmatch(cursor or _FIRST):
        raise ValueError(f"{cursor!r} is not a cursor")
    first, *position = map(int, (cursor or _FIRST).split("."))
    if position[1] >= 2**64:
        raise ValueError(f"{cursor!r} is not a cursor")
    views: list[RecordView] = []
    end = time.monotonic() + seconds
    for number in range(first, len(stores)):
        store = stores[number]
        start = (position[0], position[1]) if number == first else START
        with store.open_reader() as reader:
            for following, page in reader.scan_from(start, record_filter.task, count=limit):
                views += _matching(page, reader, store, record_filter)
                if len(views) >= limit or time.monotonic() > end:
                    if following is not None:
                        return RecordPage(views, f"{number}.{following[0]}.{following[1]}")
                    more = number + 1 < len(stores)
                    return RecordPage(views, f"{number + 1}.0.0" if more else "")
    return RecordPage(views, "")


def _matching(
    page: Iterable[ScannedRecord],
    reader: RecordReader,
    store: RecordStore,
    record_filter: RecordFilter,
) -> Iterator[RecordView]:
    for scanned in page:
        try:
            record = reader.read(scanned)
        except CorruptRecordError:
            if not record_filter.needs_record:
                yield RecordView(scanned.key, None, scanned.now, store)
            continue
        if record_filter.matches(record, scanned.now):
            yield RecordView(scanned.key, record, scanned.now, store)


def records(
    stores: Iterable[RecordStore],
    *,
    state: State | str | None = None,
    task: str | None = None,
    older_than: timedelta | float | None = None,
) -> Iterator[Record]:
    """Returns the records in `stores`, by SCAN on every primary of a cluster, in no order.

    A result is decoded, and a large one is fetched, when `Record.result` is read. Records that
    cannot be read are left out and logged.

    Args:
        state: only records in this state.
        task: only records of this task, by name.
        older_than: only records that entered their state longer ago (seconds, or a timedelta).

    Raises:
        StoreUnavailableError: if Redis does not reply.
    """
    if older_than is not None and not isinstance(older_than, timedelta):
        older_than = timedelta(seconds=older_than)
    record_filter = RecordFilter(None if state is None else State(state), task, older_than)
    for page in record_views(stores, record_filter):
        for record_view in page:
            if record_view.record is None:
                logger.warning(
                    "The record of %s cannot be read",
                    record_view.key,
                    extra=log_extra(record_view.key),
                )
            else:
                yield record_view.record
