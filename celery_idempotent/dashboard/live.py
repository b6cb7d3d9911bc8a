"""Announces changes of a page by server-sent events; the page then reloads itself."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from celery_idempotent.dashboard.context import PAGE_SIZE, Context, query_of
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.store.inspection.record_reader import RecordView

#: Seconds between two reads; until an unchanged page is refreshed, since its times age; and between
#: comments that keep proxies from closing the connection.
POLL_INTERVAL, REFRESH_INTERVAL, PING_INTERVAL = 1.0, 30.0, 10
#: Minimum pause after a read, as a multiple of its duration.
PAUSE = 10
#: Streams per process. A user may hold at most as many as are free, hence at most half.
MAX_STREAMS = 64


class Live:
    """The endpoint /live, as an ASGI application.

    A stream is counted before the first await, and uncounted however it ends.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        #: The number of each user's streams.
        self._streams: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends an event ``changed`` whenever the page's data have changed."""
        request = Request(scope)
        user = request.state.access.user
        if self._streams[user] >= MAX_STREAMS - self._streams.total():
            raise HTTPException(503, "Too many pages are open: close some.")
        events = self._events(dict(request.query_params))
        headers = {"x-accel-buffering": "no"}
        self._streams[user] += 1
        try:
            response = EventSourceResponse(events, headers=headers, ping=PING_INTERVAL)
            await response(scope, receive, send)
        finally:
            self._streams[user] -= 1
            self._streams += Counter()  # forgets users without streams

    async def _events(self, shown: dict[str, str]) -> AsyncIterator[ServerSentEvent]:
        last, sent_at = "", anyio.current_time()
        while True:
            started_at = anyio.current_time()
            digest = await run_in_threadpool(self._digest, shown)
            cost = anyio.current_time() - started_at
            is_old = anyio.current_time() - sent_at > REFRESH_INTERVAL
            if digest != last or is_old:
                # The first event refreshes a page that has reconnected.
                yield ServerSentEvent(event="changed", data=digest)
                last, sent_at = digest, anyio.current_time()
            await anyio.sleep(max(POLL_INTERVAL, PAUSE * cost))

    def _digest(self, shown: dict[str, str]) -> str:
        try:
            state = self._state(shown)
        except (IdempotencyError, HTTPException) as error:
            state = str(error)
        return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()

    def _state(self, shown: dict[str, str]) -> Any:
        sampler = self._context.sampler
        if key := shown.get("key"):
            view = self._context.find(key)
            return None if view is None else _state(view)
        if shown.get("view") == "records":
            views, cursor = self._context.page(query_of(shown), shown.get("cursor", ""), PAGE_SIZE)
            return [_state(view) for view in views], cursor
        if shown.get("view") == "doctor":
            return sampler.findings()
        snapshot = sampler.snapshot()
        return (
            [_state(view) for view in snapshot.started],
            [(worker.name, worker.counts, len(worker.leases)) for worker in snapshot.workers],
            snapshot.total,
            snapshot.error,
            snapshot.workers_error,
            [finding.name for finding in sampler.known_findings() or ()],
        )


def _state(view: RecordView) -> Any:
    record = view.record
    shown = () if record is None else (record.attempt, record.at_ms, record.body)
    return str(view.key), view.version, view.is_past_deadline, shown
