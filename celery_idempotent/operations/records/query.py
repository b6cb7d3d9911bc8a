"""Finds records by state, task and age, and by the task id, which monitoring shows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from celery_idempotent.core.events.report import log_extra
from celery_idempotent.core.key import Key
from celery_idempotent.core.printable import printable
from celery_idempotent.core.record import Record, State
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.reference import Reference
from celery_idempotent.core.store.scan import key_of
from celery_idempotent.operations.records.reader import RecordReader, RecordView

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which records to return; a field that is None matches all."""

    #: A `State`, or ``CORRUPT`` for records that cannot be read.
    state: str | None = None
    task: str | None = None
    #: Time since the outcome, or since the begin if there is none yet.
    older_than: timedelta | None = None
    #: Id of the task that holds the key, or stored the outcome.
    task_id: str | None = None
    #: Part of the label, in any case.
    label: str | None = None
    #: Part of the label, task, key, task id or worker, in any case.
    text: str | None = None

    def matches(self, view: RecordView) -> bool:
        """Returns whether all fields match except the task, which the scan selects."""
        record = view.record
        if self.state not in (None, view.state):
            return False
        if self.text is not None and not contains(self.text, *words_of(view)):
            return False
        if record is None:
            return (self.task_id, self.older_than, self.label) == (None, None, None)
        return (
            (self.task_id is None or record.task_id == self.task_id)
            and (self.label is None or contains(self.label, record.label))
            and (self.older_than is None or view.now - view.since > self.older_than)
        )


def words_of(view: RecordView) -> list[str]:
    """Returns the texts by which people know a record: first its label, if it can be read."""
    key, record = view.key, view.record
    words = [key.task, str(key)]
    return words if record is None else [record.label, *words, record.task_id, record.worker]


def contains(part: str, *texts: str) -> bool:
    """Returns whether one of the texts contains `part`, in any case."""
    return any(part.casefold() in text.casefold() for text in texts)


def read_view(store: RecordStore, key: Key) -> RecordView | None:
    """Reads the whole record of `key`; None if it is absent."""
    with RecordReader.open(store) as reader:
        return reader.get([key], whole=True).get(key)


def record_views(
    stores: Iterable[RecordStore],
    record_filter: RecordFilter,
    *,
    expiry: bool = True,
    for_people: bool = True,
) -> Iterator[list[RecordView]]:
    """Yields the records in pages, which may be empty.

    Records that cannot be read are included, unless the filter is by task id, age or a `State`.

    Raises:
        StoreUnavailableError: if Redis does not reply.
    """
    for store in stores:
        with RecordReader.open(store, for_people=for_people) as reader:
            for page in reader.scan(record_filter.task, expiry=expiry):
                yield [view for view in page if record_filter.matches(view)]


def records(
    stores: Iterable[RecordStore],
    *,
    state: State | str | None = None,
    task: str | None = None,
    older_than: timedelta | float | None = None,
    label: str | None = None,
) -> Iterator[Record]:
    """Yields the records in `stores`, unordered, by SCAN on every primary of a cluster.

    Reading `Record.result` decodes the result, and fetches a large one. Records that cannot be
    read are left out; without `state`, `older_than` and `label`, they are logged.

    Args:
        state: only records in this state.
        task: only records of this task, by name.
        older_than: only records that entered their state longer ago (seconds or timedelta).
        label: only records whose label contains this text, in any case.

    Raises:
        StoreUnavailableError: if Redis does not reply.
    """
    if older_than is not None and not isinstance(older_than, timedelta):
        older_than = timedelta(seconds=older_than)
    state = None if state is None else State(state)
    record_filter = RecordFilter(state, task, older_than, label=label)
    for page in record_views(stores, record_filter, for_people=False):
        for record_view in page:
            if record_view.record is None:
                logger.warning(
                    "The record of %s cannot be read",
                    record_view.key,
                    extra=log_extra(record_view.key),
                )
            else:
                yield record_view.record


def find_duplicate(stores: Sequence[RecordStore], task_id: str) -> RecordView | Reference | None:
    """Like :func:`find_task`, but without a scan: finds only duplicates."""
    for store in stores:
        reference = store.reference(task_id)
        key = key_of(reference.key, store.config.prefix) if reference else None
        if reference is None or key is None:
            continue
        # The task that was a duplicate may have run since, so first the records that it would have
        # written: that of the key and, if the key may run again, that of the message.
        for own_key in () if reference.replayed else (key, key.of_message(task_id)):
            view = read_view(store, own_key)
            if view and view.record and view.record.task_id == task_id:
                return view
        view = read_view(store, key)
        return replace(view, reference=reference) if view else reference
    return None


def find_task(stores: Sequence[RecordStore], task_id: str) -> RecordView | Reference | None:
    """Returns the record of a task's execution, or the one that it found as a duplicate.

    Finding a duplicate takes one read in each store; anything else takes a scan of all records.

    Returns:
        The record, with its reference for a duplicate; the reference alone if that record is
        absent; None if neither a record nor a reference has the task id.

    Raises:
        StoreUnavailableError: if Redis does not reply.
    """
    if (found := find_duplicate(stores, task_id)) is not None:
        return found
    for page in record_views(stores, RecordFilter(task_id=task_id)):
        for view in page:
            # Read again, because a scan leaves out the finished steps of a long record.
            whole = read_view(view.store, view.key)
            return whole if whole and whole.version == view.version else view
    # A scan returns only the last execution of a key that may run again. An earlier one has a
    # record under the key of its message.
    for store in stores:
        with RecordReader.open(store) as reader:
            key = reader.find_message(task_id)
        if key is not None:
            return read_view(store, key)
    return None


def find_label(stores: Iterable[RecordStore], label: str) -> list[RecordView]:
    """Returns the records with this label, in any case; scans all records.

    Raises:
        StoreUnavailableError: if Redis does not reply.
    """
    label = printable(label)
    pages = record_views(stores, RecordFilter(label=label))
    views = (view for page in pages for view in page)
    return [v for v in views if v.record and v.record.label.casefold() == label.casefold()]
