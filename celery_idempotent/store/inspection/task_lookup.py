"""From a task id, the one that monitoring shows, to the record that answered the task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from celery_idempotent.store.inspection.record_query import (
    RecordFilter,
    RecordView,
    read_view,
    record_views,
)
from celery_idempotent.store.inspection.scan import key_of
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.reference import Reference


class FoundTask(NamedTuple):
    """What is known of a task id."""

    #: The record of its execution, or the one that it met as a duplicate; None if that is absent.
    view: RecordView | None
    #: What it met as a duplicate; None if it has executed.
    reference: Reference | None


def find_task(stores: Sequence[RecordStore], task_id: str) -> FoundTask | None:
    """Returns what is known of `task_id`; None if no record names it, nor any duplicate left it.

    A duplicate is found by one read in each store, anything else by a scan of all records.

    Raises:
        StoreUnavailableError: if Redis does not reply.
    """
    return find_duplicate(stores, task_id) or _find_execution(stores, task_id)


def find_duplicate(stores: Iterable[RecordStore], task_id: str) -> FoundTask | None:
    """As :func:`find_task`, without a scan."""
    for store in stores:
        reference = store.reference(task_id)
        key = key_of(reference.key, store.config.prefix) if reference else None
        if reference is None or key is None:
            continue
        if not reference.replayed:
            # It may have run since, under the key or, if that may run again, a message's.
            for own_key in (key, key.of_message(task_id)):
                view = read_view(store, own_key)
                if view and view.record and view.record.task_id == task_id:
                    return FoundTask(view, None)
        return FoundTask(read_view(store, key), reference)
    return None


def _find_execution(stores: Sequence[RecordStore], task_id: str) -> FoundTask | None:
    for page in record_views(stores, RecordFilter()):
        for view in page:
            if view.record is not None and view.record.task_id == task_id:
                return FoundTask(view, None)
    # The record of a key that may run again is of its last execution.
    for store in stores:
        with store.open_reader() as reader:
            key = reader.find_message(task_id)
        if key is not None:
            return FoundTask(read_view(store, key), None)
    return None
