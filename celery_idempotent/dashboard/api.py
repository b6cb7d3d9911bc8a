"""The JSON API, with the documents of ``celery idempotency … --json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from celery_idempotent.dashboard.access import Access
from celery_idempotent.dashboard.context import Context, query_of
from celery_idempotent.dashboard.protection import parse_json, read_body
from celery_idempotent.monitoring import forgetting, json_format, rerunning
from celery_idempotent.store.inspection.record_reader import RecordView

#: Maximum records per page.
MAX_LIMIT = 500

_STATUS = {
    forgetting.FORGOTTEN: 200,
    forgetting.ABSENT: 404,
    forgetting.RUNNING: 409,
    forgetting.CHANGED: 412,
}
_RERUN_STATUS = {
    rerunning.PUBLISHED: 202,
    rerunning.NOT_ENDED: 409,
    rerunning.NO_MESSAGE: 409,
    rerunning.CHANGED: 412,
}


def json_response(
    document: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns `document` as JSON; values without a JSON form become text."""
    text = json.dumps(document, default=str)
    return Response(f"{text}\n", status, headers, media_type="application/json")


class Api:
    """The endpoints below /api."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        """Returns the routes."""
        return [
            Route("/records", self.records),
            Route("/records/{key}", self.record, methods=["GET"]),
            Route("/records/{key}", self.forget, methods=["DELETE"]),
            Route("/records/{key}/rerun", self.rerun, methods=["POST"]),
            Route("/stats", self.stats),
            Route("/doctor", self.doctor),
            Route("/workers", self.workers),
            Route("/explain", self.explain, methods=["POST"]),
        ]

    def records(self, request: Request) -> Response:
        """Returns a page of records and the cursor of the next one."""
        query = request.query_params
        limit = _integer(query.get("limit", "50"))
        views, cursor = self._context.page(query_of(query), query.get("cursor", ""), limit)
        records = [json_format.view_fields(view) for view in views]
        return json_response({"records": records, "cursor": cursor or None})

    def record(self, request: Request) -> Response:
        """Returns one record; its headers carry what a DELETE needs."""
        view = self._find(request)
        access: Access = request.state.access
        document = json_format.view_fields(view)
        if access.results:
            document |= json_format.outcome_fields(view.record)
        headers = {"etag": _etag(view)}
        if access.forget:
            headers["x-csrf-token"] = self._context.tokens.csrf(access.user)
        return json_response(document, headers=headers)

    def forget(self, request: Request) -> Response:
        """Forgets one record if its ETag still matches If-Match."""
        view, user = self._unchanged(request), request.state.access.user
        force = request.query_params.get("force") == "true"
        case = forgetting.forget(view.key, view, self._context.tasks, user=user, force=force)
        return json_response({"key": str(view.key), "case": case}, _STATUS[case])

    def rerun(self, request: Request) -> Response:
        """Runs an ended call again if its record's ETag still matches If-Match."""
        view = self._unchanged(request)
        call = self._context.ended_call(str(view.key), view)
        repeats = request.query_params.get("repeat") == "true"
        if call is not None and call.has_completed and not repeats:
            raise HTTPException(400, "It has run to its end: ?repeat=true repeats its effect.")
        case = rerunning.rerun(call, user=request.state.access.user)
        return json_response({"key": str(view.key), "case": case}, _RERUN_STATUS[case])

    def _unchanged(self, request: Request) -> RecordView:
        """Checks right, CSRF token and ETag, then returns the record to change."""
        access: Access = request.state.access
        check_right(access)
        if not self._context.tokens.is_csrf(request.headers.get("x-csrf-token", ""), access.user):
            raise HTTPException(403, "Send the header X-CSRF-Token of the record's GET.")
        view = self._find(request)
        expected = request.headers.get("if-match")
        if expected is None:
            raise HTTPException(428, "Send the ETag of the record's GET as If-Match.")
        if expected != _etag(view):
            raise HTTPException(412, "The record has changed: read it again.")
        return view

    def _find(self, request: Request) -> RecordView:
        view = self._context.find(request.path_params["key"])
        if view is None:
            raise HTTPException(404, "There is no such record.")
        return view

    def stats(self, request: Request) -> Response:
        """Returns the number of records by task and state, and the workers' counters."""
        snapshot = self._context.sampler.snapshot(asked=True)
        counts, counted_at = snapshot.totals(), snapshot.counted_at
        tasks: dict[str, Any] = {
            task: {
                "states": found.states if (found := snapshot.records.get(task)) else {},
                "counts": counts.get(task, {}),
            }
            for task in sorted({*snapshot.records, *counts})
        }
        workers_answered = bool(snapshot.workers)
        return json_response(
            {
                "workers_answered": workers_answered,
                "counted_at": counted_at and counted_at.isoformat(),
                "tasks": tasks,
            }
        )

    def doctor(self, request: Request) -> Response:
        """Returns the findings."""
        findings = self._context.sampler.findings()
        return json_response({"findings": [finding.to_json() for finding in findings]})

    def workers(self, request: Request) -> Response:
        """Returns the leases and counters of each worker that replies."""
        workers = self._context.sampler.snapshot(asked=True).workers
        return json_response(
            {
                worker.name: {
                    "leases": worker.leases,
                    "counts": worker.counts,
                    "redelivery": worker.redelivery,
                }
                for worker in workers
            }
        )

    async def explain(self, request: Request) -> Response:
        """Explains the call in the request's JSON object."""
        call = parse_json(await read_body(request), "The body")
        if not isinstance(call, dict):
            raise HTTPException(400, "The body is not a JSON object.")
        explained = await run_in_threadpool(self._context.explain, call)
        return json_response(explained.to_json())


def check_right(access: Access) -> None:
    """Refuses a user who may not forget and rerun records.

    Raises:
        HTTPException: 403.
    """
    if not access.forget:
        raise HTTPException(403, "You may not change records, or the dashboard is read-only.")


def _etag(view: RecordView) -> str:
    return '"{}-{}"'.format(*view.version)


def _integer(text: str) -> int:
    if not re.fullmatch("[0-9]{1,3}", text) or not 1 <= int(text) <= MAX_LIMIT:
        raise HTTPException(400, f"limit is not a number from 1 to {MAX_LIMIT}.")
    return int(text)
