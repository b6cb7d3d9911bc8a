"""Finds records by state, task and age."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from celery_idempotent.events.report import log_extra
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import Record, State
from celery_idempotent.store.inspection.record_reader import START, RecordReader, RecordView
from celery_idempotent.store.record_store import RecordStore

logger = logging.getLogger(__name__)


#: The beginning: store, primary and cursor of SCAN.
_FIRST = "0.0.0"
_CURSOR = re.compile(r"\d{1,4}\.\d{1,4}\.\d{1,20}")


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

    def matches(self, view: RecordView) -> bool:
        """Returns whether all but the task match, which the scan has selected."""
        record = view.record
        if record is None:
            return self == RecordFilter(task=self.task)
        return (
            (self.state is None or record.state is self.state)
            and (self.task_id is None or record.task_id == self.task_id)
            and (self.label is None or self.label.casefold() in record.label.casefold())
            and (self.older_than is None or view.now - view.since > self.older_than)
        )


def read_view(store: RecordStore, key: Key, *, whole: bool = False) -> RecordView | None:
    """Reads the record of `key`; None if it is absent.

    Args:
        whole: also read what a scan leaves out of a long record: its finished steps.
    """
    with RecordReader.open(store) as reader:
        return reader.get([key], whole=whole).get(key)


def record_views(
    stores: Iterable[RecordStore], record_filter: RecordFilter, *, expiry: bool = True
) -> Iterator[list[RecordView]]:
    """Returns the records in pages, which may be empty.

    Records that cannot be read are included, unless the filter is by more than the task.

    Raises:
        StoreUnavailableError: if Redis does not reply.
    """
    return (page for _, page in _pages([*stores], record_filter, expiry=expiry))


def _pages(
    stores: Sequence[RecordStore],
    record_filter: RecordFilter,
    cursor: str = _FIRST,
    **options: Any,
) -> Iterator[tuple[str, list[RecordView]]]:
    """Yields each page after the cursor of the next one, which is empty after the last one."""
    first, *start = map(int, cursor.split("."))
    for number in range(first, len(stores)):
        with RecordReader.open(stores[number]) as reader:
            position = (start[0], start[1]) if number == first else START
            for following, page in reader.scan(position, record_filter.task, **options):
                store_and_position = (number, *following) if following else (number + 1, *START)
                is_last = store_and_position[0] == len(stores)
                next_cursor = "" if is_last else ".".join(map(str, store_and_position))
                yield next_cursor, [view for view in page if record_filter.matches(view)]


class RecordPage(NamedTuple):
    """Some of the records that a filter selects."""

    views: list[RecordView]
    #: Where the next page begins, for :func:`record_page`; empty after the last one.
    cursor: str


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
    cursor = cursor or _FIRST
    if not _CURSOR.fullmatch(cursor) or int(cursor.rpartition(".")[2]) >= 2**64:
        raise ValueError(f"{cursor!r} is not a cursor")
    views: list[RecordView] = []
    end = time.monotonic() + seconds
    for next_cursor, page in _pages(stores, record_filter, cursor, count=limit):
        views += page
        if len(views) >= limit or time.monotonic() > end:
            return RecordPage(views, next_cursor)
    return RecordPage(views, "")


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
