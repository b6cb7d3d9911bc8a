"""The pages, and the JSON API with the documents of ``celery idempotency … --json``."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from celery_idempotent.core.record import OFFLOADED, Record
from celery_idempotent.dashboard.changes import version
from celery_idempotent.dashboard.context import Context
from celery_idempotent.dashboard.history import RANGES
from celery_idempotent.dashboard.index import STATES, Query, TaskTotals
from celery_idempotent.dashboard.presentation import (
    DECISIONS,
    is_api,
    json_response,
    key_path,
    render,
    task_columns,
)
from celery_idempotent.dashboard.protection import Access, parse_json, read_body, read_form
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.operations.calls import formatting
from celery_idempotent.operations.calls.lookup import outcome_or_error, record_document
from celery_idempotent.operations.doctor import versions
from celery_idempotent.operations.records.reader import RecordView
from celery_idempotent.operations.worker.inspect_commands import stack_in
from celery_idempotent.signals import SHADOW

#: Records per page: the default, and the maximum.
PAGE_SIZE, MAX_LIMIT = 50, 500


class Views:
    """The endpoints that only read. Most return a page, and below /api its data."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        """Returns the routes."""
        shared = {
            "/records": self.records,
            "/records/{key}": self.record,
            "/doctor": self.doctor,
            "/workers": self.workers,
        }
        return [
            Route("/", self.overview),
            Route("/search", self.search),
            Route("/explain", self.explain_form, methods=["GET"]),
            Route("/explain", self.explain, methods=["POST"]),
            Route("/api/explain", self.api_explain, methods=["POST"]),
            Route("/api/stats", self.stats),
            *(Route(f"{api}{path}", view) for path, view in shared.items() for api in ("", "/api")),
        ]

    def overview(self, request: Request) -> Response:
        """Shows running calls, charts, records by task, and the worst findings."""
        sampler, parameters = self._context.sampler.wait(), request.query_params
        chosen, order = parameters.get("range", "1h"), parameters.get("sort", "task")
        if chosen not in RANGES:
            raise HTTPException(400, f"{chosen!r} is not one of {', '.join(RANGES)}")
        history = sampler.history.range(chosen, time.time())
        totals, names = sampler.replies.totals, {task.name for task in self._context.tasks}
        rows = {}
        for name in sorted(names | set(history.tasks) | set(sampler.records)):
            records = sampler.records.get(name) or TaskTotals()
            counts = history.tasks.get(name, Counter())
            rows[name] = task_columns(records, counts, history.seen)
        if order != "task":
            by_value = sorted(rows, key=lambda name: rows[name].get(order) or 0.0, reverse=True)
            rows = {name: rows[name] for name in by_value}
        tasks = {name: row for name, row in rows.items() if any(row.values())}
        titles = next(iter(rows.values()), {})
        return render(
            request,
            "overview.html",
            sampler=sampler,
            charts={title: history.sums(names) for title, names in DECISIONS.items()},
            history=history,
            since=datetime.fromtimestamp(history.since, tz=timezone.utc),
            chosen=chosen,
            order=order,
            tasks=tasks,
            columns=[t for t in titles if t != "Corrupt" or any(r[t] for r in rows.values())],
            idle=[name for name in rows if name not in tasks],
            shadowed={name: n for name, n in sorted(totals.items()) if any(map(n.get, SHADOW))},
            findings=sampler.known_findings(),
        )

    def stats(self, request: Request) -> Response:
        """Returns the number of records by task and state, and the workers' counters."""
        sampler = self._context.sampler.wait(asked=True)
        counts, counted_at = sampler.replies.totals, sampler.index.finished_at
        tasks: dict[str, Any] = {
            task: {
                "states": found.states if (found := sampler.records.get(task)) else {},
                "counts": counts.get(task, {}),
            }
            for task in sorted({*sampler.records, *counts})
        }
        return json_response(
            {
                "workers_answered": bool(sampler.replies.workers),
                "counted_at": counted_at and counted_at.isoformat(),
                "tasks": tasks,
            }
        )

    def records(self, request: Request) -> Response:
        """Returns a page of records, and the cursor of the next one."""
        parameters = request.query_params
        query, cursor = Query.of(parameters), parameters.get("cursor", "")
        limit = _limit(parameters.get("limit", str(PAGE_SIZE)))
        views, next_cursor = self._context.page(query, cursor, limit)
        if is_api(request):
            records = [formatting.view_fields(view) for view in views]
            return json_response({"records": records, "cursor": next_cursor or None})
        return render(
            request,
            "records.html",
            query=query,
            views=views,
            cursor=cursor,
            next_cursor=next_cursor,
            tasks=self._context.tasks,
            states=STATES,
            sampler=self._context.sampler.wait(),
        )

    def search(self, request: Request) -> Response:
        """Redirects to the only record with a key, task id or text, else to all with the text."""
        text = request.query_params.get("q", "").strip()
        if not text:
            raise HTTPException(400, "Enter a key, a task id or a part of a label.")
        view = self._context.search(text)
        path = f"/records?{urlencode({'text': text})}" if view is None else key_path(view.key)
        if view is not None and view.reference is not None:
            path += f"?{urlencode({'task_id': text})}"
        return RedirectResponse(f"{request.state.root}{path}", 303)

    def record(self, request: Request) -> Response:
        """Returns one record; the headers of its document carry what a change needs."""
        key, access = request.path_params["key"], request.state.access
        duplicate = request.query_params.get("task_id", "")
        view = self._context.find(key, whole=True, duplicate=duplicate)
        sql_outcome = outcome_or_error(self._context.tasks, key)
        if is_api(request):
            found = view or sql_outcome
            if found is None:
                raise HTTPException(404, "There is no such record.")
            if isinstance(found, IdempotencyError):
                raise found
            document = record_document(found.key, view, sql_outcome, results=access.results)
            if stack := self._stack(view):
                document["stack"] = stack
            headers = {"etag": f'"{version(view)}"'}
            if access.forget:
                shown = [(key, version(view))]
                headers["x-csrf-token"] = self._context.sign(access.user, shown)
            return json_response(document, headers=headers)
        if view is None:
            findings = self._context.sampler.known_findings() or ()
            evicted = [finding for finding in findings if finding.name == "evicted"]
            values = {"key": key, "evicted": evicted, "sql_outcome": sql_outcome}
            return render(request, "absent.html", status=404, **values)
        record = view.record
        return render(
            request,
            "record.html",
            view=view,
            duplicate=duplicate,
            record=record,
            outcome=_outcome(record, access),
            facts=record and formatting.record_texts(record, view.now, formatting.FACTS),
            steps=formatting.finished_steps(record),
            stack=self._stack(view),
            sql_outcome=sql_outcome,
        )

    def _stack(self, view: RecordView | None) -> list[str]:
        """Returns where the body of a running call was when the workers were last asked."""
        record = view.record if view else None
        return stack_in(self._context.sampler.wait().replies, record) if record else []

    def explain_form(self, request: Request) -> Response:
        """Shows the form for a call."""
        return self._explain_page(request, request.query_params)

    async def explain(self, request: Request) -> Response:
        """Shows the form and the explanation of its call."""
        form = await read_form(request)
        try:
            call = dict(form) | {
                name: parse_json(form.get(name, "").strip() or empty, f"The field {name}")
                for name, empty in (("args", "[]"), ("kwargs", "{}"))
            }
            explained = await run_in_threadpool(self._context.explain, call)
        except HTTPException as error:
            return self._explain_page(request, form, error=error.detail, status=error.status_code)
        return self._explain_page(request, form, explained=explained)

    def _explain_page(self, request: Request, form: Mapping[str, str], **answer: Any) -> Response:
        call = {name: form.get(name, "") for name in ("task", "args", "kwargs", "key", "task_id")}
        values = {"explained": None, "error": "", "tasks": self._context.tasks, **answer}
        return render(request, "explain.html", call=call, **values)

    async def api_explain(self, request: Request) -> Response:
        """Explains the call in the request's JSON object."""
        call = parse_json(await read_body(request), "The body")
        if not isinstance(call, dict):
            raise HTTPException(400, "The body is not a JSON object.")
        explained = await run_in_threadpool(self._context.explain, call)
        return json_response(explained.to_json())

    def workers(self, request: Request) -> Response:
        """Returns the workers that reply, their leases and counters."""
        sampler = self._context.sampler.wait(asked=True)
        if is_api(request):
            names = ("leases", "counts", "redelivery")
            workers = sampler.replies.workers.items()
            return json_response(
                {name: {each: getattr(worker, each) for each in names} for name, worker in workers}
            )
        return render(request, "workers.html", sampler=sampler)

    def doctor(self, request: Request) -> Response:
        """Returns all findings."""
        findings = self._context.sampler.findings()
        if is_api(request):
            return json_response({"findings": [finding.to_json() for finding in findings]})
        stores = list(dict.fromkeys(str(store.config) for store in self._context.stores))
        installed = versions.installed()
        return render(request, "doctor.html", findings=findings, versions=installed, stores=stores)


def _limit(text: str) -> int:
    if not re.fullmatch("[0-9]{1,3}", text) or not 1 <= int(text) <= MAX_LIMIT:
        raise HTTPException(400, f"limit is not a number from 1 to {MAX_LIMIT}.")
    return int(text)


def _outcome(record: Record | None, access: Access) -> dict[str, Any]:
    """Returns the parts of a record's outcome that the user may see."""
    if record is None or not record.state.finished:
        return {}
    if not access.results:
        return {"hidden": "You may not see results and errors."}
    if record.format.startswith(OFFLOADED):
        return {"hidden": "It is stored outside of Redis: celery idempotency show fetches it."}
    return formatting.outcome_fields(record)
