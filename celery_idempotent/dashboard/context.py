"""What all endpoints share: the app's tasks, the sampler, signed tokens, and bounded queries."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from celery import Celery
from itsdangerous import BadData, URLSafeTimedSerializer
from starlette.exceptions import HTTPException

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.core.key import Key
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.dashboard.index import Query
from celery_idempotent.dashboard.sampler import Sampler
from celery_idempotent.errors import KeyRuleError, StoreUnavailableError
from celery_idempotent.operations.calls import formatting
from celery_idempotent.operations.calls.lookup import find_record
from celery_idempotent.operations.calls.prediction import ExplainedCall, explain_call
from celery_idempotent.operations.records.query import (
    RecordFilter,
    find_duplicate,
    record_views,
)
from celery_idempotent.operations.records.reader import RecordView

#: Maximum seconds to scan for a task id missing from the index.
SEARCH_SECONDS = 1.0
#: Seconds for which a token stays valid.
TOKEN_SECONDS = 900

#: Key and version of a record as shown to a user; it is changed only if it is still the same.
ShownRecord = tuple[str, str]


class Context:
    """The app behind the dashboard. Its methods block.

    Args:
        secret: signs tokens; the same in all processes that serve the dashboard; None for a random
            one.
        history: as for :class:`Sampler`.
    """

    def __init__(self, app: Celery, secret: str | bytes | None, history: str) -> None:
        self.app = app
        self._serializer = URLSafeTimedSerializer(
            secret or secrets.token_bytes(32), salt="celery-idempotent dashboard: records"
        )
        self._history = history
        self._sampler: Sampler | None = None
        self._lock = threading.Lock()

    @property
    def tasks(self) -> list[IdempotentTaskLike]:
        """The app's idempotent tasks; first use imports their modules."""
        return app_tasks.load(self.app)

    @property
    def stores(self) -> list[RecordStore]:
        """The stores of the tasks."""
        return app_tasks.stores(self.tasks)

    @property
    def sampler(self) -> Sampler:
        """The sampler; starts one at first use, and in a forked process, which has no threads."""
        with self._lock:
            if self._sampler is None or not self._sampler.is_alive():
                self._sampler = Sampler(self.app, self._history)
                self._sampler.start()
            return self._sampler

    def close(self) -> None:
        """Stops the sampler; a later request starts another one."""
        with self._lock:
            if self._sampler is not None:
                self._sampler.close()
            self._sampler = None

    def sign(self, user: str, records: list[ShownRecord]) -> str:
        """Returns a token for records that `user` has seen. To change one, the token must be sent.

        Another site cannot read it, so it cannot make the user's browser send a valid request.
        """
        return self._serializer.dumps([user, records])

    def verify(self, token: str, user: str) -> list[ShownRecord] | None:
        """Returns the records of a token; None if it is forged, too old, or another user's."""
        try:
            owner, records = self._serializer.loads(token, max_age=TOKEN_SECONDS)
        except BadData:
            return None
        return [(key, version) for key, version in records] if owner == user else None

    def page(self, query: Query, cursor: str, limit: int) -> tuple[list[RecordView], str]:
        """Returns `limit` records, and the cursor of the next page.

        Raises:
            HTTPException: 400 if the query or the cursor is invalid.
            StoreUnavailableError: if Redis does not reply.
        """
        offset = cursor or "0"
        if not re.fullmatch("[0-9]{1,7}", offset):
            raise HTTPException(400, f"{cursor!r} is not a cursor")
        if error := self.sampler.wait().error:
            raise StoreUnavailableError(error)
        index = self.sampler.index
        index.refresh()
        try:
            views = index.page(query, limit + 1, int(offset))
        except ValueError as invalid:
            raise HTTPException(400, str(invalid)) from None
        return views[:limit], str(int(offset) + limit) if len(views) > limit else ""

    def find(self, text: str, *, whole: bool = False, duplicate: str = "") -> RecordView | None:
        """Returns the record of a key, as :func:`find_record` does.

        Args:
            whole: also read the part of a long record that a scan omits.
            duplicate: the task id of a duplicate. If its reference leads to this record, the view
                has the reference.
        """
        index = self.sampler.index

        def read(store: RecordStore, key: Key) -> RecordView | None:
            return index.read(store, [key], whole=whole).get(key)

        view = find_record(self.tasks, text, read)
        found = view and duplicate and find_duplicate(self.stores, duplicate)
        if isinstance(found, RecordView) and view and found.key == view.key:
            return replace(view, reference=found.reference)
        return view

    def search(self, text: str) -> RecordView | None:
        """Returns the only record with a key, a task id (also a duplicate's) or another text."""
        found = self.find(text) or find_duplicate(self.stores, text)
        if isinstance(found, RecordView):
            return found
        views = self.sampler.index.page(Query(text=text), 2)
        if not views:  # the record may be newer than the index
            end = time.monotonic() + SEARCH_SECONDS
            for views in record_views(self.stores, RecordFilter(task_id=text)):
                if views or time.monotonic() > end:
                    break
        return views[0] if len(views) == 1 else None

    def explain(self, call: Mapping[str, Any]) -> ExplainedCall:
        """Explains a call.

        Args:
            call: ``task``, ``args``, ``kwargs``, ``key`` (a text, or a list of texts) and
                ``task_id``; all but the task may be missing.

        Raises:
            HTTPException: 400 if it is not a valid call of an idempotent task.
        """
        name, args, kwargs = call.get("task"), call.get("args", []), call.get("kwargs", {})
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise HTTPException(400, "The arguments are not a JSON list and a JSON object.")
        explicit_key, task_id = call.get("key") or None, call.get("task_id") or None
        if isinstance(explicit_key, list):
            explicit_key = tuple(explicit_key)
        try:
            return explain_call(self.tasks, name, args, kwargs, explicit_key, task_id)
        except TypeError as error:
            text = str(error)
        except KeyRuleError as error:
            text = f"No key can be derived: {formatting.key_error(error)}"
        raise HTTPException(400, f"{text[:1].upper()}{text[1:]}.")
