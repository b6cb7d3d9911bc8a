"""The pages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from celery_idempotent.dashboard.access import Access
from celery_idempotent.dashboard.api import check_right
from celery_idempotent.dashboard.context import PAGE_SIZE, Context, query_of
from celery_idempotent.dashboard.history import RANGES
from celery_idempotent.dashboard.index import STATES
from celery_idempotent.dashboard.presentation import DECISIONS, TaskRow, key_path, render
from celery_idempotent.dashboard.protection import parse_json, read_body
from celery_idempotent.dashboard.timeline import timeline
from celery_idempotent.dashboard.tokens import ShownRecord
from celery_idempotent.dashboard.tree import tree
from celery_idempotent.doctor import versions
from celery_idempotent.monitoring import forgetting, formatting, json_format, rerunning
from celery_idempotent.monitoring.lookup import find_outcome
from celery_idempotent.record.payload import OFFLOADED
from celery_idempotent.record.record import Record, State
from celery_idempotent.signals import SHADOW

#: Maximum records per confirmation.
MAX_SELECTED = 500


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
            Route("/rerun", self.confirm_rerun, methods=["GET"]),
            Route("/rerun", self.rerun, methods=["POST"]),
            Route("/explain", self.explain_form, methods=["GET"]),
            Route("/explain", self.explain, methods=["POST"]),
            Route("/workers", self.workers),
            Route("/doctor", self.doctor),
        ]

    def overview(self, request: Request) -> Response:
        """Shows running calls, charts, records by task, and the worst findings."""
        sampler, parameters = self._context.sampler, request.query_params
        snapshot, now = sampler.snapshot(), time.time()
        chosen, order = parameters.get("range", "1h"), parameters.get("sort", "task")
        if chosen not in RANGES:
            raise HTTPException(400, f"{chosen!r} is not one of {', '.join(RANGES)}")
        history, counts = sampler.history.range(chosen, now), snapshot.totals()
        names = {task.name for task in self._context.tasks}
        rows = [
            TaskRow.of(name, snapshot.records.get(name), history)
            for name in sorted(names | set(history.tasks) | set(snapshot.records))
        ]
        if order != "task":
            rows.sort(key=lambda row: row.columns.get(order) or 0.0, reverse=True)
        return render(
            request,
            "overview.html",
            snapshot=snapshot,
            charts=[history.chart(title, names) for title, names in DECISIONS.items()],
            history=history,
            since=datetime.fromtimestamp(history.since, tz=timezone.utc),
            chosen=chosen,
            order=order,
            tasks=[row for row in rows if any(row.columns.values())],
            columns=[
                title
                for title in (rows[0].columns if rows else ())
                if title != "Corrupt" or any(row.columns[title] for row in rows)
            ],
            idle=[row.name for row in rows if not any(row.columns.values())],
            shadowed={name: n for name, n in sorted(counts.items()) if any(map(n.get, SHADOW))},
            findings=sampler.known_findings(),
            sql_outcomes=sampler.sql_outcomes,
        )

    def records(self, request: Request) -> Response:
        """Shows a page of records."""
        query = query_of(request.query_params)
        cursor = request.query_params.get("cursor", "")
        views, next_cursor = self._context.page(query, cursor, PAGE_SIZE)
        return render(
            request,
            "records.html",
            query=query,
            views=views,
            cursor=cursor,
            next_cursor=next_cursor,
            tasks=self._context.tasks,
            states=STATES,
            snapshot=self._context.sampler.snapshot(),
            full=self._context.sampler.index.full,
        )

    def search(self, request: Request) -> Response:
        """Redirects to the record of a key or task id, else to the records with this text."""
        text = request.query_params.get("q", "").strip()
        if not text:
            raise HTTPException(400, "Enter a key, a task id or a part of a label.")
        view = self._context.search(text)
        path = f"/records?{urlencode({'text': text})}" if view is None else key_path(view.key)
        return RedirectResponse(f"{request.state.root}{path}", 303)

    def record(self, request: Request) -> Response:
        """Shows one record."""
        key = request.path_params["key"]
        view = self._context.find(key, whole=True)
        shown: dict[str, Any] = {"sql_outcome": find_outcome(self._context.tasks, key)}
        if view is None:
            found = self._context.sampler.known_findings() or ()
            evicted = [finding for finding in found if finding.name == "evicted"]
            return render(request, "absent.html", status=404, key=key, evicted=evicted, **shown)
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
        """Asks whether to forget the named records, or those that a query selects."""
        access: Access = request.state.access
        check_right(access)
        query, cursor = query_of(request.query_params), ""
        if keys := request.query_params.getlist("key"):
            found = [self._context.find(key) for key in keys[:MAX_SELECTED]]
            views = [view for view in found if view is not None]
        elif any(value for name, value in query.items() if name != "sort"):
            start = request.query_params.get("cursor", "")
            views, cursor = self._context.page(query, start, MAX_SELECTED // 2)
        else:
            raise HTTPException(400, "Select records by state, task, age or text.")
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

    async def _answer(self, request: Request) -> tuple[dict[str, str], list[ShownRecord]]:
        """Returns the submitted confirmation form and its records.

        Raises:
            HTTPException: if the user lacks the right, or the form is forged or too old.
        """
        form = await _read_form(request)
        access: Access = request.state.access
        check_right(access)
        if not self._context.tokens.is_csrf(form.get("csrf", ""), access.user):
            raise HTTPException(403, "The form is too old, or was forged: open the page again.")
        selected = self._context.tokens.selected(form.get("selection", ""), access.user)
        if selected is None:
            raise HTTPException(400, "The question is too old: open the page again.")
        return form, selected

    async def forget(self, request: Request) -> Response:
        """Forgets those records of a confirmation that have not changed since."""
        form, selected = await self._answer(request)
        access: Access = request.state.access
        cases = await run_in_threadpool(
            self._context.forget, selected, access.user, force=form.get("force") == "yes"
        )
        kept = {key: _KEPT[case] for key, case in cases.items() if case != forgetting.FORGOTTEN}
        status, forgotten = 409 if kept else 200, len(cases) - len(kept)
        return render(request, "forgotten.html", status=status, forgotten=forgotten, kept=kept)

    def confirm_rerun(self, request: Request) -> Response:
        """Asks whether to run one call again."""
        access: Access = request.state.access
        check_right(access)
        call = self._context.ended_call(request.query_params.get("key", ""))
        if call is None:
            raise HTTPException(404, "There is no such record, or it has not ended.")
        if call.message is None:
            raise HTTPException(409, f"{call.key}: {rerunning.MESSAGES[rerunning.NO_MESSAGE]}.")
        tokens = self._context.tokens
        return render(
            request,
            "rerun.html",
            call=call,
            arguments=tree(call.arguments) if access.results else None,
            selection=tokens.selection(access.user, [(str(call.key), str(call.state), call.token)]),
            csrf=tokens.csrf(access.user),
        )

    async def rerun(self, request: Request) -> Response:
        """Runs the call of a confirmation again, if it has not changed since."""
        form, (shown, *_) = await self._answer(request)
        key, state, _ = shown
        if state == State.COMPLETED and form.get("repeat") != "yes":
            raise HTTPException(400, "Confirm that the effect is to be repeated.")
        case = await run_in_threadpool(self._context.rerun, shown, request.state.access.user)
        if case != rerunning.PUBLISHED:
            raise HTTPException(409, f"{key}: {rerunning.MESSAGES[case]}.")
        return render(request, "published.html", key=key)

    def explain_form(self, request: Request) -> Response:
        """Shows the form for a call."""
        return self._explain_page(request, request.query_params)

    async def explain(self, request: Request) -> Response:
        """Shows the form and the explanation of its call."""
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
        snapshot = self._context.sampler.snapshot(asked=True)
        return render(request, "workers.html", snapshot=snapshot)

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
    """Returns the parts of a record's outcome that the user may see."""
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
