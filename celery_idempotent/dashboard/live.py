"""Announces changes of a page by server-sent events; the page then requests itself again."""

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

from celery_idempotent.dashboard.context import Context
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.store.inspection.record_reader import RecordView

#: Seconds between two reads, after which a page is announced anyway because its times are old, and
#: between comments that keep proxies from closing the connection.
POLL_INTERVAL, REFRESH_INTERVAL, PING_INTERVAL = 1.0, 30.0, 10
#: Streams of one process. A user may have as many as are free, thus half of them at most.
MAX_STREAMS = 64


class Live:
    """The endpoint /live, as an ASGI application: a stream takes its place before anything waits
    and returns it whichever way it ends.
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
        events = self._events(request.query_params.get("key", ""))
        headers = {"x-accel-buffering": "no"}
        self._streams[user] += 1
        try:
            response = EventSourceResponse(events, headers=headers, ping=PING_INTERVAL)
            await response(scope, receive, send)
        finally:
            self._streams[user] -= 1
            self._streams += Counter()  # forgets users without streams

    async def _events(self, key: str) -> AsyncIterator[ServerSentEvent]:
        last, sent_at = "", anyio.current_time()
        while True:
            digest = await run_in_threadpool(self._digest, key)
            is_old = anyio.current_time() - sent_at > REFRESH_INTERVAL
            if digest != last or is_old:
                # The first event is for a page that has reconnected.
                yield ServerSentEvent(event="changed", data=digest)
                last, sent_at = digest, anyio.current_time()
            await anyio.sleep(POLL_INTERVAL)

    def _digest(self, key: str) -> str:
        state = self._record_state(key) if key else self._overview_state()
        return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()

    def _record_state(self, key: str) -> Any:
        try:
            view = self._context.find(key)
        except IdempotencyError as error:
            return str(error)
        return None if view is None else _state(view)

    def _overview_state(self) -> Any:
        sampler = self._context.sampler
        snapshot = sampler.snapshot()
        return (
            [_state(view) for view in snapshot.started],
            [(worker.name, worker.counts, len(worker.leases)) for worker in snapshot.workers],
            snapshot.records.total,
            snapshot.error,
            [finding.name for finding in sampler.known_findings() or ()],
        )


def _state(view: RecordView) -> Any:
    record = view.record
    shown = () if record is None else (record.attempt, record.at_ms, record.body)
    return str(view.key), view.version, view.is_past_deadline, shown
