"""The pages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from celery_idempotent.dashboard.access import Access
from celery_idempotent.dashboard.api import check_right
from celery_idempotent.dashboard.context import Context, query_of
from celery_idempotent.dashboard.history import chart
from celery_idempotent.dashboard.presentation import DECISIONS, key_path, render
from celery_idempotent.dashboard.protection import parse_json, read_body
from celery_idempotent.dashboard.timeline import timeline
from celery_idempotent.dashboard.tree import tree
from celery_idempotent.doctor import versions
from celery_idempotent.monitoring import forgetting, formatting, json_format
from celery_idempotent.monitoring.lookup import find_outcome
from celery_idempotent.record.payload import OFFLOADED
from celery_idempotent.record.record import Record

#: Rows of a page of records, and records that one confirmation may be about.
PAGE_SIZE, MAX_SELECTED = 50, 500


class Pages:
    """The endpoints that return HTML."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        """Returns the routes."""
        return [
            Route("/", self.overview),
            Route("/records", self.records),
            Route("/search", self.search),
            Route("/records/{key}", self.record),
            Route("/forget", self.confirm, methods=["GET"]),
            Route("/forget", self.forget, methods=["POST"]),
            Route("/explain", self.explain_form, methods=["GET"]),
            Route("/explain", self.explain, methods=["POST"]),
            Route("/workers", self.workers),
            Route("/doctor", self.doctor),
        ]

    def overview(self, request: Request) -> Response:
        """Shows what runs, the charts, the records of each task, and the worst findings."""
        sampler = self._context.sampler
        snapshot, now = sampler.snapshot(), time.monotonic()
        counts, numbers = snapshot.totals(), sampler.history.numbers
        names = {task.name for task in self._context.tasks}
        return render(
            request,
            "overview.html",
            live="view=overview",
            snapshot=snapshot,
            charts=[chart(title, numbers(names, now)) for title, names in DECISIONS.items()],
            tasks=sorted(names | set(counts) | set(snapshot.records.by_task)),
            counts=counts,
            findings=sampler.known_findings(),
            sql_outcomes=sampler.sql_outcomes,
        )

    def records(self, request: Request) -> Response:
        """Shows a page of records."""
        query = query_of(request.query_params)
        cursor = request.query_params.get("cursor", "")
        views, next_cursor = self._context.page(query, cursor, PAGE_SIZE)
        views.sort(key=lambda view: view.since, reverse=True)
        page: dict[str, Any] = {"views": views, "cursor": cursor, "next_cursor": next_cursor}
        return render(request, "records.html", query=query, tasks=self._context.tasks, **page)

    def search(self, request: Request) -> Response:
        """Redirects to the record of a key or of a task id."""
        text = request.query_params.get("q", "").strip()
        if not text:
            raise HTTPException(400, "Enter a key or a task id.")
        view = self._context.search(text)
        if view is None:
            raise HTTPException(404, f"No record has the key or the task id {text}.")
        return RedirectResponse(f"{request.state.root}{key_path(view.key)}", 303)

    def record(self, request: Request) -> Response:
        """Shows one record."""
        key = request.path_params["key"]
        view = self._context.find(key, whole=True)
        shown: dict[str, Any] = {"live": urlencode({"key": key})}
        shown["sql_outcome"] = find_outcome(self._context.tasks, key)
        if view is None:
            return render(request, "absent.html", status=404, key=key, **shown)
        names = formatting.finished_steps(view.record)
        return render(
            request,
            "record.html",
            view=view,
            record=view.record,
            events=timeline(view, names),
            outcome=_outcome(view.record, request.state.access),
            steps=names,
            **shown,
        )

    def confirm(self, request: Request) -> Response:
        """Asks whether to forget one record, or those that a filter selects."""
        access: Access = request.state.access
        check_right(access)
        query, cursor = query_of(request.query_params), ""
        if key := request.query_params.get("key", ""):
            view = self._context.find(key)
            views = [] if view is None else [view]
        elif any(query.values()):
            start = request.query_params.get("cursor", "")
            views, cursor = self._context.page(query, start, MAX_SELECTED // 2)
        else:
            raise HTTPException(400, "Select records by state, task, age or label.")
        views = views[:MAX_SELECTED]
        shown = [(str(view.key), *view.version) for view in views]
        return render(
            request,
            "confirm.html",
            views=views,
            query=query,
            next_cursor=cursor,
            any_running=any(view.state == "STARTED" for view in views),
            selection=self._context.tokens.selection(access.user, shown),
            csrf=self._context.tokens.csrf(access.user),
        )

    async def forget(self, request: Request) -> Response:
        """Forgets the records of a confirmation that have not changed since."""
        form = await _read_form(request)
        access: Access = request.state.access
        check_right(access)
        if not self._context.tokens.is_csrf(form.get("csrf", ""), access.user):
            raise HTTPException(403, "The form is too old, or was forged: open the page again.")
        selected = self._context.tokens.selected(form.get("selection", ""), access.user)
        if selected is None:
            raise HTTPException(400, "The question is too old: open the page again.")
        cases = await run_in_threadpool(
            self._context.forget, selected, access.user, force=form.get("force") == "yes"
        )
        kept = {key: _KEPT[case] for key, case in cases.items() if case != forgetting.FORGOTTEN}
        status, forgotten = 409 if kept else 200, len(cases) - len(kept)
        return render(request, "forgotten.html", status=status, forgotten=forgotten, kept=kept)

    def explain_form(self, request: Request) -> Response:
        """Shows the form for a call."""
        return self._explain_page(request, request.query_params)

    async def explain(self, request: Request) -> Response:
        """Shows the form, and the explanation of its call."""
        form = await _read_form(request)
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

    def workers(self, request: Request) -> Response:
        """Shows the workers that reply, their leases and counters."""
        snapshot = self._context.sampler.snapshot()
        return render(request, "workers.html", live="view=workers", snapshot=snapshot)

    def doctor(self, request: Request) -> Response:
        """Shows all findings."""
        stores = list(dict.fromkeys(str(store.config) for store in self._context.stores))
        findings, installed = self._context.sampler.findings(), versions.installed()
        return render(request, "doctor.html", findings=findings, versions=installed, stores=stores)


_KEPT = {
    forgetting.RUNNING: "kept: it is running",
    forgetting.CHANGED: "kept: it has changed since it was shown",
    forgetting.ABSENT: "already absent",
}


def _outcome(record: Record | None, access: Access) -> dict[str, Any]:
    """Returns the outcome of a record as far as its user may see it."""
    if record is None or not record.state.finished:
        return {}
    if not access.results:
        return {"hidden": "You may not see results and errors."}
    if record.format.startswith(OFFLOADED):
        return {"hidden": "It is stored outside of Redis: celery idempotency show fetches it."}
    fields = json_format.outcome_fields(record)
    return fields | {"tree": tree(fields["result"])} if "result" in fields else fields


async def _read_form(request: Request) -> dict[str, str]:
    body = (await read_body(request)).decode(errors="replace")
    try:
        return dict(parse_qsl(body, keep_blank_values=True, max_num_fields=20))
    except ValueError:
        raise HTTPException(400, "The form has too many fields.") from None
