"""What all endpoints share: the app's tasks, the sampler, signed tokens, and bounded queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from celery import Celery
from starlette.exceptions import HTTPException

from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.dashboard.sampler import Sampler
from celery_idempotent.dashboard.tokens import ShownRecord, Tokens
from celery_idempotent.errors import KeyRuleError
from celery_idempotent.monitoring import forgetting, formatting
from celery_idempotent.monitoring.explained_call import ExplainedCall, explain_call
from celery_idempotent.monitoring.lookup import find_record
from celery_idempotent.record.record import State
from celery_idempotent.store.inspection.record_query import RecordFilter, RecordPage, record_page
from celery_idempotent.store.inspection.record_reader import RecordView
from celery_idempotent.store.inspection.task_lookup import find_task
from celery_idempotent.store.record_store import RecordStore

#: Seconds of scanning for one page of records, and for a search by task id.
PAGE_SECONDS, SEARCH_SECONDS = 0.25, 2.0


class Context:
    """The app behind the dashboard. Its methods block.

    Args:
        secret: as for :class:`Tokens`.
    """

    def __init__(self, app: Celery, secret: str | bytes | None) -> None:
        self.app = app
        self.tokens = Tokens(secret)
        self.sampler = Sampler(app)

    @property
    def tasks(self) -> list[IdempotentTaskLike]:
        """The app's idempotent tasks, whose modules the first request imports."""
        return app_tasks.load(self.app)

    def warm_up(self) -> None:
        """Determines what the first request would wait for."""
        self.sampler.snapshot()
        self.sampler.known_findings()

    @property
    def stores(self) -> list[RecordStore]:
        """The stores of the tasks."""
        return app_tasks.stores(self.tasks)

    def page(self, query: Mapping[str, str], cursor: str, limit: int) -> RecordPage:
        """Returns about `limit` records that `query` selects, after a scan of bounded time.

        Raises:
            HTTPException: 400 if a field of `query` or the cursor is invalid.
        """
        try:
            record_filter = RecordFilter(
                State(query["state"].upper()) if query["state"] else None,
                query["task"] or None,
                formatting.parse_duration(query["older_than"]) if query["older_than"] else None,
                label=query["label"] or None,
            )
            return record_page(
                self.stores, record_filter, cursor, limit=limit, seconds=PAGE_SECONDS
            )
        except ValueError as error:
            raise HTTPException(400, str(error)) from None

    def find(self, text: str, *, whole: bool = False) -> RecordView | None:
        """Returns the record of a key, as :func:`find_record` does."""
        return find_record(self.tasks, text, whole=whole)

    def search(self, text: str) -> RecordView | None:
        """Returns the record of a key or a task id, or the one that a duplicate of this id met.

        Returns None if neither a reference nor a scan of bounded time leads to it.
        """
        found = self.find(text) or find_task(self.stores, text, SEARCH_SECONDS)
        return found if isinstance(found, RecordView) else None

    def forget(self, records: Iterable[ShownRecord], user: str, *, force: bool) -> dict[str, str]:
        """Forgets those of `records` that are as they were shown; returns the case of each key."""
        cases = {}
        for key, *version in records:
            view = self.find(key)
            if view is None:
                cases[key] = forgetting.ABSENT
            elif [*view.version] != version:
                cases[key] = forgetting.CHANGED
            else:
                cases[key] = forgetting.forget(view.key, view, self.tasks, user=user, force=force)
        return cases

    def explain(self, call: Mapping[str, Any]) -> ExplainedCall:
        """Explains a call.

        Args:
            call: ``task``, ``args``, ``kwargs``, ``key`` (a text, or a list of texts) and
                ``task_id``; all but the task may be missing.

        Raises:
            HTTPException: 400 if it is not the call of an idempotent task.
        """
        name, args, kwargs = call.get("task"), call.get("args", []), call.get("kwargs", {})
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise HTTPException(400, "The arguments are not a JSON list and a JSON object.")
        own_key, task_id = call.get("key") or None, call.get("task_id") or None
        if isinstance(own_key, list):
            own_key = tuple(own_key)
        try:
            return explain_call(self.tasks, name, args, kwargs, own_key, task_id)
        except TypeError as error:
            text = str(error)
        except KeyRuleError as error:
            text = f"No key can be derived: {error}"
        raise HTTPException(400, f"{text[:1].upper()}{text[1:]}.")


def query_of(parameters: Mapping[str, str]) -> dict[str, str]:
    """Returns the fields of a filter in the parameters of a request; empty where it has none."""
    names = ("state", "task", "older_than", "label")
    return {name: parameters.get(name, "").strip() for name in names}
