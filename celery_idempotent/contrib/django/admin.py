"""The admin of outcomes, each shown beside its record in Redis.

Outcomes are read-only, but can be forgotten and run again. The permissions are ``view_outcome``,
``forget_outcome``, and ``view_outcome_result``, which shows results and errors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.admin.utils import unquote
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied, SuspiciousOperation
from django.core.paginator import Paginator
from django.db import connections, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse

from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.contrib.django.models import Outcome
from celery_idempotent.contrib.django.tasks import idempotent_tasks
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.monitoring import forgetting, formatting, json_format, rerunning
from celery_idempotent.monitoring.lookup import SqlOutcome, moment
from celery_idempotent.printable import plural
from celery_idempotent.record.payload import OFFLOADED
from celery_idempotent.record.record import State
from celery_idempotent.sql.outcomes import Row, row_id
from celery_idempotent.store.inspection.record_reader import RecordView
from celery_idempotent.store.inspection.scan import key_of

#: The most rows that a list counts, as the table may have millions.
MAX_COUNT = 10_000
#: The most characters shown of a result.
MAX_RESULT = 20_000

_KEPT = {
    forgetting.CHANGED: "has changed since it was shown",
    forgetting.ABSENT: "was already absent",
    "unknown": "is not of a task in this process, with this database",
}
_UNCONFIRMED = "unconfirmed"
_FORGET_CASES = {
    forgetting.FORGOTTEN: "forgotten",
    forgetting.RUNNING: "is running: it can be forgotten when its lease has expired",
    **_KEPT,
}
_RERUN_CASES = {
    rerunning.PUBLISHED: "published again",
    rerunning.NOT_ENDED: "has not ended",
    rerunning.NO_MESSAGE: "has no message: forget it, and publish the call with its arguments",
    _UNCONFIRMED: "was kept: confirm that its effect is to be repeated",
    **_KEPT,
}


class _Action(NamedTuple):
    """An action on outcomes, which the user must confirm."""

    title: str
    noun: str
    act: Callable[..., str]
    #: The values that `act` returns, each with the rest of a sentence; the first is success.
    cases: Mapping[str, str]
    #: For the entry in the admin's log.
    flag: int
    entry: str


def find(outcome: Outcome, idempotent: Iterable[IdempotentTaskLike]) -> SqlOutcome | None:
    """Returns the row with its task and key, or None if these are not found.

    A step's row has no key of its own.
    """
    for task in idempotent:
        configuration = task.idempotency_configuration
        prefix = configuration.executor.store.config.prefix
        key = key_of(outcome.record_key, prefix)
        if configuration.settings.transaction is None or key is None or key.task != task.name:
            continue
        for candidate in (key, key.of_message(outcome.task_id)):
            if outcome.pk == row_id(prefix, candidate):
                return SqlOutcome(task, candidate, _row(outcome))
    return None


def _row(outcome: Outcome) -> Row:
    values = [getattr(outcome, name) for name in Row._fields[:-1]]
    return Row.read([*values, round(time.time() * 1000)])


class BoundedPaginator(Paginator):
    """Paginates the first MAX_COUNT rows, and counts no further."""

    @cached_property
    def count(self) -> int:
        """The number of rows, or MAX_COUNT if there are more."""
        return int(self.object_list.order_by()[:MAX_COUNT].count())


class StateFilter(admin.SimpleListFilter):
    """Filters outcomes by state, without querying the states in use."""

    title, parameter_name = "state", "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Returns the states of outcomes."""
        return [(state.value, state.value) for state in State if state.finished]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Outcome]) -> QuerySet[Outcome]:
        """Selects the outcomes."""
        return queryset.filter(state=self.value()) if self.value() else queryset


class TaskFilter(admin.SimpleListFilter):
    """Filters outcomes by the idempotent tasks of this process."""

    title, parameter_name = "task", "task"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Returns the names of the tasks."""
        return [(task.name, task.name) for task in idempotent_tasks()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Outcome]) -> QuerySet[Outcome]:
        """Selects the outcomes."""
        task = self.value()
        return queryset.filter(record_key__startswith=_begin(task)) if task else queryset


def _begin(task: str) -> str:
    """Returns the prefix of the keys of `task`."""
    return f"{quote(task, safe='')}:"


@admin.register(Outcome)
class OutcomeAdmin(admin.ModelAdmin):
    """Lists outcomes, shows each beside the record of its key, and forgets both.

    Without `using`, the rows are in the database alias that idempotency_transaction names in all
    tasks.
    """

    #: Database alias; None for the one that the tasks name.
    using: ClassVar[str | None] = None

    list_display = ("record_key", "state", "task_id", "attempt", "finished", "kept_until")
    list_filter = (StateFilter, TaskFilter)
    # The only order with an index.
    ordering = ("-expires_at",)
    sortable_by = ()
    search_fields = ("task_id",)
    search_help_text = "A key, a task, or a whole task id (which reads the table)"
    fields = readonly_fields = ("record_key",)
    actions = ("forget_selected", "rerun_selected")
    paginator = BoundedPaginator
    show_full_result_count = False
    if hasattr(admin, "ShowFacets"):  # Django 5.0; facets would be counted
        show_facets = admin.ShowFacets.NEVER

    def has_add_permission(self, request: HttpRequest, obj: Outcome | None = None) -> bool:
        """Nobody adds, changes or deletes outcomes by hand; they can only be forgotten."""
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def has_forget_permission(self, request: HttpRequest) -> bool:
        """Whether the user may forget outcomes."""
        return bool(request.user.has_perm("celery_idempotent.forget_outcome"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Outcome]:
        """Returns the outcomes, without their bodies."""
        queryset = super().get_queryset(request).defer("body", "outbox")
        databases = app_tasks.databases(idempotent_tasks())
        aliases = [each.source for each in databases if each.source in [*connections]]
        alias = self.using or (aliases[0] if len(aliases) == 1 else None)
        return queryset.using(alias) if alias else queryset

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Outcome], search_term: str
    ) -> tuple[QuerySet[Outcome], bool]:
        """Finds a task, a key (by the indexed primary key), or a task id."""
        term = search_term.strip()
        tasks = idempotent_tasks()
        if any(term == task.name for task in tasks):
            return queryset.filter(record_key__startswith=_begin(term)), False
        prefixes = {store.config.prefix for store in app_tasks.stores(tasks)}
        keys = [(prefix, key_of(term, prefix)) for prefix in prefixes]
        ids = [row_id(prefix, key) for prefix, key in keys if key is not None]
        chosen = {"pk__in": ids} if ids else {"task_id": term} if term else {}
        return queryset.filter(**chosen), False

    @admin.display(description="finished")
    def finished(self, outcome: Outcome) -> str:
        """Returns the time of the outcome's commit."""
        return _time(outcome.finished_at)

    @admin.display(description="kept until")
    def kept_until(self, outcome: Outcome) -> str:
        """Returns the end of the retention."""
        return _time(outcome.expires_at)

    def get_urls(self) -> list[Any]:
        """Adds the pages of `forget` and `rerun`."""
        name, own = f"{self.opts.app_label}_{self.opts.model_name}", []
        for action in _ACTIONS:
            ask, answer = (
                self.admin_site.admin_view(partial(view, action=action))
                for view in (self.ask_view, self.answer_view)
            )
            for alias in connections:  # the outcome is forgotten in a separate transaction
                answer = transaction.non_atomic_requests(alias)(answer)
            own += [
                path(f"{action}/", answer, name=f"{name}_{action}_selected"),
                path(f"<path:object_id>/{action}/", ask, name=f"{name}_{action}"),
            ]
        return [*own, *super().get_urls()]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Shows one outcome beside its record."""
        context = {**(extra_context or {}), "may_forget": self.has_forget_permission(request)}
        outcome = self.get_object(request, unquote(object_id))
        if outcome is not None and self.has_view_permission(request, outcome):
            found = find(outcome, idempotent_tasks())
            view, error = _read(found)
            result = {"hidden": "It cannot be decoded: its task is not in this process."}
            if not request.user.has_perm("celery_idempotent.view_outcome_result"):
                result = {"hidden": "You may not see results and errors."}
            elif found is not None:
                result = _outcome_text(found)
            context |= {"rows": _rows(outcome, view), "record_error": error, "result": result}
            context["is_step"] = len(outcome.pk) > 32
        return super().change_view(request, object_id, form_url, context)

    @admin.action(description="Forget selected outcomes", permissions=["forget"])
    def forget_selected(self, request: HttpRequest, queryset: QuerySet[Outcome]) -> HttpResponse:
        """Asks whether to forget the selected outcomes."""
        return self._ask(request, list(queryset[: self.list_max_show_all]), "forget")

    @admin.action(description="Run selected calls again", permissions=["forget"])
    def rerun_selected(self, request: HttpRequest, queryset: QuerySet[Outcome]) -> HttpResponse:
        """Asks whether to run the selected calls again."""
        return self._ask(request, list(queryset[: self.list_max_show_all]), "rerun")

    def ask_view(self, request: HttpRequest, object_id: str, action: str) -> HttpResponse:
        """Asks whether to forget one outcome, or to run its call again."""
        self._check(request)
        outcome = self.get_object(request, unquote(object_id))
        return self._ask(request, [] if outcome is None else [outcome], action)

    def _ask(self, request: HttpRequest, outcomes: Sequence[Outcome], action: str) -> HttpResponse:
        shown, idempotent = [], idempotent_tasks()
        sees_arguments = request.user.has_perm("celery_idempotent.view_outcome_result")
        for outcome in outcomes:
            found = find(outcome, idempotent)
            view, error = _read(found)
            arguments = ""
            if action == "rerun" and found is not None and sees_arguments:
                arguments = _arguments(found, view, idempotent)
            version = [outcome.pk, outcome.owner, *_record_version(view)]
            shown.append((outcome, view, error, json.dumps(version), arguments))
        context = {
            **self.admin_site.each_context(request),
            "title": _ACTIONS[action].title,
            "opts": self.opts,
            "shown": shown,
            "action": action,
            "answer_url": self._url(f"{action}_selected"),
            "has_completed": any(each.state == State.COMPLETED for each in outcomes),
        }
        template = "admin/celery_idempotent/outcome/confirm.html"
        return TemplateResponse(request, template, context)

    def answer_view(self, request: HttpRequest, action: str) -> HttpResponse:
        """Applies `action` to the confirmed outcomes that have not changed since."""
        self._check(request)
        if request.method != "POST":
            return HttpResponse(status=405, headers={"Allow": "POST"})
        idempotent, number, cases = idempotent_tasks(), 0, _ACTIONS[action].cases
        success = next(iter(cases))
        for text in request.POST.getlist("shown")[: self.list_max_show_all]:
            try:
                key, case = self._act(request, text, idempotent, _ACTIONS[action])
            except IdempotencyError as error:
                self.message_user(request, str(error), messages.ERROR)
                break
            number += case == success
            if case != success:
                self.message_user(request, f"The outcome of {key} {cases[case]}.", messages.WARNING)
        if number:
            done = plural(number, _ACTIONS[action].noun)
            self.message_user(request, f"{done} {cases[success]}.")
        return HttpResponseRedirect(self._url("changelist"))

    def _url(self, page: str) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{page}"
        return str(reverse(name, current_app=self.admin_site.name))

    def _check(self, request: HttpRequest) -> None:
        if not (self.has_view_permission(request) and self.has_forget_permission(request)):
            raise PermissionDenied

    def _act(
        self,
        request: HttpRequest,
        text: str,
        idempotent: Sequence[IdempotentTaskLike],
        action: _Action,
    ) -> tuple[str, str]:
        """Applies `action` to an outcome if unchanged since shown; returns its key and the case."""
        try:
            pk, owner, *shown_record = map(str, json.loads(text))
        except (ValueError, TypeError):
            raise SuspiciousOperation from None
        outcome = self.get_object(request, pk)
        if outcome is None:
            return pk, forgetting.ABSENT
        found = find(outcome, idempotent)
        if found is None:
            return outcome.record_key, "unknown"
        view = found.record()
        if outcome.owner != owner or (view is not None and _record_version(view) != shown_record):
            return outcome.record_key, forgetting.CHANGED
        case = action.act(request, found, view, idempotent)
        if case == next(iter(action.cases)):
            _log(request, outcome, action)
        return outcome.record_key, case


def _forget(
    request: HttpRequest,
    found: SqlOutcome,
    view: RecordView | None,
    idempotent: Sequence[IdempotentTaskLike],
) -> str:
    user = request.user.get_username()
    return forgetting.forget(found.key, view, idempotent, user=user, outcome=found)


def _rerun(
    request: HttpRequest,
    found: SqlOutcome,
    view: RecordView | None,
    idempotent: Sequence[IdempotentTaskLike],
) -> str:
    call = rerunning.find_ended(idempotent, found.key, view, found)
    if call is not None and call.has_completed and request.POST.get("repeat") != "yes":
        return _UNCONFIRMED
    return rerunning.rerun(call, user=request.user.get_username())


_ACTIONS = {
    "forget": _Action("Forget outcomes?", "outcome", _forget, _FORGET_CASES, DELETION, "Forgotten"),
    "rerun": _Action("Run calls again?", "call", _rerun, _RERUN_CASES, CHANGE, "Run again"),
}


def _read(found: SqlOutcome | None) -> tuple[RecordView | None, str]:
    """Returns the record of an outcome's key, or why it cannot be read."""
    if found is None:
        return None, "Its task is not in this process, or has another database."
    try:
        return found.record(), ""
    except IdempotencyError as error:
        return None, str(error)


def _arguments(
    found: SqlOutcome, view: RecordView | None, idempotent: Sequence[IdempotentTaskLike]
) -> str:
    """Returns the arguments for running a call again, or why it cannot run."""
    try:
        call = rerunning.find_ended(idempotent, found.key, view, found)
    except IdempotencyError as error:
        return str(error)
    return _shortened(call.arguments) if call is not None and call.message is not None else ""


def _record_version(view: RecordView | None) -> list[str]:
    """Returns the values that identify a record's version."""
    return ["absent", "0"] if view is None else list(map(str, view.version))


def _rows(outcome: Outcome, view: RecordView | None) -> list[tuple[str, Any, Any]]:
    """Returns the name of each field with its values in the database and in Redis."""
    record = view.record if view else None
    in_redis = json_format.record_fields(record) if record else {}
    in_redis["state"] = view.state.replace("CORRUPT", "unreadable") if view else "absent"
    in_database = {name: getattr(outcome, name, "") for name in _COMPARED}
    in_database |= {name: _time(in_database[name]) for name in ("finished_at", "expires_at")}
    return [(name, in_database[name], in_redis.get(name)) for name in _COMPARED]


_COMPARED = (
    *("state", "task_id", "worker", "attempt", "token", "label", "started_at"),
    *("finished_at", "expires_at", "deadline"),
)


def _outcome_text(found: SqlOutcome) -> dict[str, str]:
    """Returns the database's outcome as text; `hidden` says why it is not shown."""
    if found.row.format.startswith(OFFLOADED):
        return {"hidden": "It is stored outside: celery idempotency show fetches it."}
    fields = found.outcome_fields()
    if "not_stored" in fields:
        return {"hidden": f"Not available: {fields['not_stored']}"}
    if "error" in fields:
        return {"error": "{type}: {message}".format(**fields["error"])[:MAX_RESULT]}
    return {"value": _shortened(fields.get("result"))}


def _shortened(value: Any) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]}…"


def _time(milliseconds: Any) -> str:
    return formatting.utc(moment(milliseconds)) if milliseconds else "–"


def _log(request: HttpRequest, outcome: Outcome, action: _Action) -> None:
    """Adds an entry to the admin's log, for which Django's functions differ between versions."""
    LogEntry.objects.create(
        user_id=request.user.pk,
        content_type_id=ContentType.objects.get_for_model(outcome).pk,
        object_id=outcome.pk,
        object_repr=str(outcome)[:200],
        action_flag=action.flag,
        change_message=action.entry,
    )
