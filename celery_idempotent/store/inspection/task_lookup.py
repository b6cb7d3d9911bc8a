"""Finds the record that answered a task by its task id, which monitoring shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from celery_idempotent.store.inspection.record_query import RecordFilter, read_view, record_views
from celery_idempotent.store.inspection.record_reader import RecordReader, RecordView
from celery_idempotent.store.inspection.scan import key_of
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.reference import Reference


def find_duplicate(stores: Sequence[RecordStore], task_id: str) -> RecordView | Reference | None:
    """Like :func:`find_task`, but without a scan: finds only duplicates."""
    for store in stores:
        reference = store.reference(task_id)
        key = key_of(reference.key, store.config.prefix) if reference else None
        if reference is None or key is None:
            continue
        # It may have run since: under the key, or a message's if the key may run again.
        for own_key in () if reference.replayed else (key, key.of_message(task_id)):
            view = read_view(store, own_key)
            if view and view.record and view.record.task_id == task_id:
                return view
        view = read_view(store, key)
        return replace(view, reference=reference) if view else reference
    return None


def find_task(stores: Sequence[RecordStore], task_id: str) -> RecordView | Reference | None:
    """Returns the record of a task's execution, or the one that it met as a duplicate.

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
            # A scan leaves out the finished steps of a long record.
            whole = read_view(view.store, view.key)
            return whole if whole and whole.version == view.version else view
    # The record of a key that may run again shows only its last execution.
    for store in stores:
        with RecordReader.open(store) as reader:
            key = reader.find_message(task_id)
        if key is not None:
            return read_view(store, key)
    return None
