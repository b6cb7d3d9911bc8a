"""Forgets records and runs ended calls again: after a confirmation on a page, or by the API.

Every change requires the right to it, and a token with the version of the record that the user has
seen.
"""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from celery_idempotent.core.record import State
from celery_idempotent.dashboard.context import Context, ShownRecord
from celery_idempotent.dashboard.index import Query
from celery_idempotent.dashboard.presentation import json_response, render
from celery_idempotent.dashboard.protection import Access, read_form
from celery_idempotent.operations.calls import changes
from celery_idempotent.operations.calls.changes import MESSAGES, EndedCall
from celery_idempotent.operations.calls.lookup import Target, find_outcome
from celery_idempotent.operations.records.reader import RecordView

#: Maximum records per confirmation.
MAX_SELECTED = 500

#: The status of the response, by what became of the record; 409 if it is kept for another reason.
_STATUSES = {changes.FORGOTTEN: 200, changes.ABSENT: 404, changes.CHANGED: 412}


def version(shown: RecordView | EndedCall | None) -> str:
    """Returns the version of a record or a call: while it is the same, nothing has changed."""
    if isinstance(shown, EndedCall):
        return shown.version
    return "" if shown is None else "{}-{}".format(*shown.version)


class Changes:
    """The endpoints that change something, and their confirmation pages."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        """Returns the routes."""
        return [
            Route("/forget", self.confirm, methods=["GET"]),
            Route("/forget", self.forget, methods=["POST"]),
            Route("/rerun", self.confirm_rerun, methods=["GET"]),
            Route("/rerun", self.rerun, methods=["POST"]),
            Route("/api/records/{key}", self.api_forget, methods=["DELETE"]),
        ]

    def confirm(self, request: Request) -> Response:
        """Asks whether to forget the named records, or those that a query selects."""
        access, query, cursor = _permitted(request), Query.of(request.query_params), ""
        if keys := request.query_params.getlist("key"):
            found = [self._context.find(key) for key in keys[:MAX_SELECTED]]
            views = [view for view in found if view is not None]
        elif query.selects:
            views, cursor = self._context.page(query, "", MAX_SELECTED)
        else:
            raise HTTPException(400, "Select records by state, task, age or text.")
        shown = [(str(view.key), version(view)) for view in views]
        return render(
            request,
            "confirm.html",
            views=views,
            query=query,
            next_cursor=cursor,
            any_running=any(view.state == State.STARTED for view in views),
            token=self._context.sign(access.user, shown),
        )

    def confirm_rerun(self, request: Request) -> Response:
        """Asks whether to run one call again, and shows all that this publishes.

        Raises:
            HTTPException: if there is none, or the user lacks the right to run it again.
        """
        access, key = _permitted(request), request.query_params.get("key", "")
        call = self._ended_call(key, self._context.find(key))
        if call is None:
            raise HTTPException(404, "There is no such record, or it has not ended.")
        if call.message is None:
            raise HTTPException(409, f"{call.key}: {MESSAGES[changes.NO_MESSAGE]}.")
        if call.has_completed and not access.repeat:
            raise HTTPException(403, "You may not repeat a call that has completed.")
        token = self._context.sign(access.user, [(key, version(call))])
        return render(request, "rerun.html", call=call, token=token)

    async def forget(self, request: Request) -> Response:
        """Forgets those records of a confirmation that have not changed since."""
        form, selected = await self._confirmed(request)
        force = form.get("force") == "yes"
        cases = await run_in_threadpool(
            lambda: {record[0]: self._forget(request, record, force=force) for record in selected}
        )
        kept = {key: MESSAGES[case] for key, case in cases.items() if case != changes.FORGOTTEN}
        status, forgotten = 409 if kept else 200, len(cases) - len(kept)
        return render(request, "forgotten.html", status=status, forgotten=forgotten, kept=kept)

    async def rerun(self, request: Request) -> Response:
        """Runs the call of a confirmation again, if it has not changed since."""
        form, (shown, *_) = await self._confirmed(request)
        repeat = form.get("repeat") == "yes"
        case = await run_in_threadpool(self._rerun, request, shown, repeat=repeat)
        if case != changes.PUBLISHED:
            raise HTTPException(409, f"{shown[0]}: {MESSAGES[case]}.")
        return render(request, "published.html", key=shown[0])

    def api_forget(self, request: Request) -> Response:
        """Forgets one record if its ETag still matches If-Match.

        Raises:
            HTTPException: if the user lacks the right, or a header is missing or forged.
        """
        access, headers, key = _permitted(request), request.headers, request.path_params["key"]
        shown = self._context.verify(headers.get("x-csrf-token", ""), access.user)
        if shown is None or [key] != [shown_key for shown_key, _ in shown]:
            raise HTTPException(403, "Send the header X-CSRF-Token of this path's GET.")
        if "if-match" not in headers:
            raise HTTPException(428, "Send the ETag of this path's GET as If-Match.")
        force = request.query_params.get("force") == "true"
        case = self._forget(request, (key, headers["if-match"].strip('"')), force=force)
        status, document = _STATUSES.get(case, 409), {"key": key, "case": case}
        error = {"error": MESSAGES[case]} if status >= 400 else {}
        return json_response(document | error, status)

    async def _confirmed(self, request: Request) -> tuple[dict[str, str], list[ShownRecord]]:
        """Returns a submitted confirmation form and its records.

        Raises:
            HTTPException: 403 if the user lacks the right, or the form is forged or too old.
        """
        form, access = await read_form(request), _permitted(request)
        shown = self._context.verify(form.get("token", ""), access.user)
        if shown is None:
            raise HTTPException(403, "The form is too old, or was forged: open the page again.")
        return form, shown

    def _forget(self, request: Request, shown: ShownRecord, *, force: bool) -> str:
        """Forgets a record if it is unchanged; returns the case."""
        view = self._context.find(shown[0])
        if view is None:
            return changes.ABSENT
        if version(view) != shown[1]:
            return changes.CHANGED
        user = request.state.access.user
        return changes.forget(Target(view.key, view), self._context.tasks, user=user, force=force)

    def _rerun(self, request: Request, shown: ShownRecord, *, repeat: bool) -> str:
        """Runs a call again if it is as it was shown; returns the case.

        Without a record in Redis, the call may still have an outcome in a database.
        """
        view = self._context.find(shown[0])
        call = self._ended_call(shown[0], view)
        if view is None and call is None:
            return changes.ABSENT
        if shown[1] != version(call):
            return changes.CHANGED
        if call is not None and call.has_completed:
            if not request.state.access.repeat:
                raise HTTPException(403, "You may not repeat a call that has completed.")
            if not repeat:
                text = "It has run to its end: confirm with 'repeat' to repeat it."
                raise HTTPException(400, text)
        return changes.rerun(call, user=request.state.access.user)

    def _ended_call(self, key: str, view: RecordView | None) -> EndedCall | None:
        """Returns the ended call of a key, with its message if kept; None without such a call."""
        tasks = self._context.tasks
        outcome = find_outcome(tasks, key)
        found = view or outcome
        return (
            None if found is None else changes.find_ended(tasks, Target(found.key, view, outcome))
        )


def _permitted(request: Request) -> Access:
    """Returns the access of a user who may change records.

    Raises:
        HTTPException: 403 for any other user.
    """
    access: Access = request.state.access
    if not access.forget:
        raise HTTPException(403, "You may not change records, or the dashboard is read-only.")
    return access
