"""What all endpoints share: the app's tasks, the sampler, signed tokens, and bounded queries."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cached_property

from celery import Celery
from starlette.exceptions import HTTPException

from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.dashboard.sampler import Sampler
from celery_idempotent.dashboard.tokens import ShownRecord, Tokens
from celery_idempotent.monitoring import forgetting, formatting
from celery_idempotent.monitoring.sql_outcome import SqlOutcome, find_sql_outcome
from celery_idempotent.record.record import State
from celery_idempotent.store.inspection.record_query import (
    RecordFilter,
    RecordPage,
    RecordView,
    read_view,
    record_page,
    record_views,
)
from celery_idempotent.store.inspection.task_lookup import find_duplicate
from celery_idempotent.store.record_store import RecordStore

#: Seconds of scanning for one page of records, and for a search by task id.
PAGE_SECONDS, SEARCH_SECONDS = 0.25, 2.0
#: Records that one confirmation may be about.
MAX_SELECTED = 500


class Context:
    """The app behind the dashboard. Its methods block.

    Args:
        secret: as for :class:`Tokens`.
    """

    def __init__(self, app: Celery, secret: str | bytes | None) -> None:
        self.app = app
        self.tokens = Tokens(secret)
        self._lock = threading.Lock()

    @property
    def tasks(self) -> list[IdempotentTaskLike]:
        """The app's idempotent tasks, whose modules the first request imports."""
        with self._lock:
            return self._tasks

    @cached_property
    def _tasks(self) -> list[IdempotentTaskLike]:
        return app_tasks.load(self.app)

    @property
    def sampler(self) -> Sampler:
        """Samples workers and records."""
        with self._lock:
            return self._sampler

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.app, self._tasks)

    def warm_up(self) -> None:
        """Determines what the first request would wait for."""
        self.sampler.snapshot()
        self.sampler.known_findings()

    @property
    def stores(self) -> list[RecordStore]:
        """The stores of the tasks."""
        return app_tasks.stores(self.tasks)

    def page(self, record_filter: RecordFilter, cursor: str, limit: int) -> RecordPage:
        """Returns about `limit` records after a scan of bounded time."""
        try:
            return record_page(
                self.stores, record_filter, cursor, limit=limit, seconds=PAGE_SECONDS
            )
        except ValueError as error:
            raise HTTPException(400, str(error)) from None

    def find(self, text: str, *, whole: bool = False) -> RecordView | None:
        """Returns the record of a key, with or without its prefix.

        Args:
            whole: read also what a scan leaves out of a long record.
        """
        # A store whose prefix is also a task's name may read a key differently from the task's own.
        tasks = sorted(self.tasks, key=lambda task: f"{task.name}:" not in text)
        for store in app_tasks.stores(tasks):
            with store.open_reader() as reader:
                key = reader.key_of(text)
            view = None if key is None else read_view(store, key, whole=whole)
            if view is not None:
                return view
        return None

    def find_task_id(self, task_id: str) -> RecordView | None:
        """Returns the record of a task id, or the one that a duplicate of this id met.

        Returns None if neither a reference nor a scan of bounded time leads to it.
        """
        found = find_duplicate(self.stores, task_id)
        if found is not None and found.view is not None:
            return found.view
        end = time.monotonic() + SEARCH_SECONDS
        for page in record_views(self.stores, RecordFilter(task_id=task_id), expiry=False):
            if page or time.monotonic() > end:
                return next(iter(page), None)
        return None

    def sql_outcome(self, text: str) -> SqlOutcome | None:
        """Returns the outcome of a key in the database of its task; None if there is none."""
        return find_sql_outcome(self.tasks, text)

    def select(self, record_filter: RecordFilter, cursor: str) -> RecordPage:
        """Returns the records that a confirmation is about, and where the next ones begin."""
        page = self.page(record_filter, cursor, MAX_SELECTED // 2)
        return RecordPage(page.views[:MAX_SELECTED], page.cursor)

    def forget(self, records: Sequence[ShownRecord], user: str, *, force: bool) -> dict[str, str]:
        """Forgets those of `records` that are as they were shown; returns the case of each key."""
        cases = dict.fromkeys((record.key for record in records), forgetting.ABSENT)
        shown = {record.key: record for record in records}
        for store in self.stores:
            with store.open_reader() as reader:
                keys = [key for record in records if (key := reader.key_of(record.key))]
            for key in keys:
                view = read_view(store, key)
                if view is None:
                    continue
                if shown_record(view) != shown[str(key)]:
                    cases[str(key)] = forgetting.CHANGED
                else:
                    case = forgetting.forget(view, self.tasks, user=user, force=force)
                    cases[str(key)] = case
        return cases


def shown_record(view: RecordView) -> ShownRecord:
    """Returns what identifies the version of a record."""
    if view.record is None:
        return ShownRecord(str(view.key), "CORRUPT", 0)
    return ShownRecord(str(view.key), view.record.state.value, view.record.token)


def filter_of(query: Mapping[str, str]) -> dict[str, str]:
    """Returns the arguments of :func:`make_filter` in the parameters of a request."""
    return {name: query.get(name, "").strip() for name in ("state", "task", "older_than", "label")}


def make_filter(state: str, task: str, older_than: str, label: str) -> RecordFilter:
    """Returns the filter that the fields of a form, or the parameters of a request, describe.

    Raises:
        HTTPException: 400 if one of them is invalid.
    """
    try:
        age: timedelta | None = formatting.parse_duration(older_than) if older_than else None
        return RecordFilter(
            State(state.upper()) if state else None, task or None, age, label=label or None
        )
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
