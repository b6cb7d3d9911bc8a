"""The admin of outcomes, each shown beside its record in Redis.

Outcomes are read-only, but can be forgotten and run again. The permissions are ``view_outcome``,
``forget_outcome``, and ``view_outcome_result``, which shows results, errors and arguments.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.admin.utils import unquote
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import SuspiciousOperation
from django.core.paginator import Paginator
from django.db import connections, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from celery_idempotent.configuration import app_tasks
from celery_idempotent.contrib.django.models import Outcome
from celery_idempotent.contrib.django.tasks import idempotent_tasks
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.monitoring import changes, formatting
from celery_idempotent.monitoring.lookup import SqlOutcome, Target
from celery_idempotent.printable import plural
from celery_idempotent.record.payload import OFFLOADED
from celery_idempotent.record.record import State, utc
from celery_idempotent.sql.outcomes import Row, row_id
from celery_idempotent.store.inspection.record_query import read_view
from celery_idempotent.store.inspection.record_reader import RecordView
from celery_idempotent.store.inspection.scan import key_of

#: The most rows that a list counts, as the table may have millions.
MAX_COUNT = 10_000
#: The most characters shown of a result.
MAX_RESULT = 20_000


class ShownOutcome:
    """A row of the table, with its task and with the record of its key."""

    def __init__(self, row: Outcome) -> None:
        self.row = row
        self.tasks = idempotent_tasks()
        #: None if the row belongs to a step, to no task of this process, or to a task with another
        #: prefix or without idempotency_transaction.
        self.found = self._find()
        #: None if the record is absent or cannot be read.
        self.view: RecordView | None = None
        self.record_error: IdempotencyError | None = None
        try:
            if self.found is not None:
                store = self.found.task.idempotency_configuration.executor.store
                self.view = read_view(store, self.found.key)
        except IdempotencyError as error:
            self.record_error = error

    def _find(self) -> SqlOutcome | None:
        for task in self.tasks:
            configuration = task.idempotency_configuration
            prefix = configuration.executor.store.config.prefix
            key = key_of(self.row.record_key, prefix)
            if configuration.settings.transaction is None or key is None or key.task != task.name:
                continue
            for candidate in (key, key.of_message(self.row.task_id)):
                if self.row.pk == row_id(prefix, candidate):
                    values = [getattr(self.row, name) for name in Row._fields[:-1]]
                    row = Row.read([*values, round(time.time() * 1000)])
                    return SqlOutcome(task, candidate, row)
        return None

    @property
    def error(self) -> str:
        """Why the record cannot be read."""
        unknown = "Unknown: a step, or no loaded task has its name, its prefix and a transaction."
        return unknown if self.found is None else str(self.record_error or "")

    @property
    def version(self) -> str:
        """The row's id and owner, and the version of the record."""
        record = ("absent", "0") if self.view is None else self.view.version
        return json.dumps([self.row.pk, self.row.owner, *map(str, record)])

    @property
    def comparison(self) -> list[tuple[str, Any, Any]]:
        """The name of each field, with its values in the database and in Redis."""
        record = self.view.record if self.view else None
        in_redis = formatting.record_fields(record) if record else {}
        in_redis["state"] = self.view.state if self.view else "absent"
        in_database = {name: getattr(self.row, name, "") for name in _COMPARED}
        in_database |= {name: _time(in_database[name]) for name in ("finished_at", "expires_at")}
        return [(name, in_database[name], in_redis.get(name)) for name in _COMPARED]

    @property
    def result(self) -> dict[str, str]:
        """The outcome in the database as text; ``hidden`` says why it is not shown."""
        if self.found is None:
            return {"hidden": "It cannot be decoded, for the reason above."}
        if self.found.row.format.startswith(OFFLOADED):
            return {"hidden": "It is offloaded: celery idempotency show fetches it."}
        fields = self.found.outcome_fields()
        if "not_stored" in fields:
            return {"hidden": f"Not available: {fields['not_stored']}"}
        if "error" in fields:
            return {"error": "{type}: {message}".format(**fields["error"])[:MAX_RESULT]}
        return {"value": _shortened(fields.get("result"))}

    @property
    def arguments(self) -> str:
        """The arguments of the call, or why they cannot be read; empty if they are not kept."""
        try:
            call = self._ended_call()
        except IdempotencyError as error:
            return str(error)
        return _shortened(call.arguments) if call is not None and call.message is not None else ""

    @property
    def _target(self) -> Target:
        assert self.found is not None
        return Target(self.found.key, self.view, self.found)

    def _ended_call(self) -> changes.EndedCall | None:
        return self.found and changes.find_ended(self.tasks, self._target)

    def forget(self, request: HttpRequest) -> str:
        """Forgets the row and the record; returns the case."""
        return changes.forget(self._target, self.tasks, user=request.user.get_username())

    def rerun(self, request: HttpRequest) -> str:
        """Runs the call again; returns the case."""
        call = self._ended_call()
        if call is not None and call.has_completed and request.POST.get("repeat") != "yes":
            return _UNCONFIRMED
        return changes.rerun(call, user=request.user.get_username())


_COMPARED = (
    *("state", "task_id", "worker", "attempt", "token", "label", "started_at"),
    *("finished_at", "expires_at", "deadline"),
)


def _shortened(value: Any) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_RESULT else f"{text[:MAX_RESULT]}…"


def _time(milliseconds: Any) -> str:
    return formatting.utc(utc(milliseconds / 1e3)) if milliseconds else "–"


_UNCONFIRMED, _UNKNOWN = "unconfirmed", "unknown"
#: What has become of an outcome.
_CASES = {
    **changes.MESSAGES,
    _UNCONFIRMED: "kept: confirm that its effect is to be repeated",
    _UNKNOWN: "kept: it is a step, or no loaded task has its name, its prefix and a transaction",
}


class _Action(NamedTuple):
    """An action on outcomes, which the user must confirm."""

    #: Of the method; also posted by the confirmation.
    name: str
    noun: str
    act: Callable[..., str]
    #: The case that `act` returns if it has succeeded.
    success: str
    #: For the entry in the admin's log.
    flag: int
    entry: str


_FORGET = _Action(
    "forget_selected", "outcome", ShownOutcome.forget, changes.FORGOTTEN, DELETION, "Forgotten"
)
_RERUN = _Action(
    "rerun_selected", "call", ShownOutcome.rerun, changes.PUBLISHED, CHANGE, "Run again"
)


class BoundedPaginator(Paginator):
    """Paginates the first MAX_COUNT rows, and counts no further."""

    @cached_property
    def count(self) -> int:
        """The number of rows, or MAX_COUNT if there are more."""
        return int(self.object_list.order_by()[:MAX_COUNT].count())


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


def _without_transaction(view: Any) -> Any:
    """Decorates a view that forgets outcomes, which needs a transaction of its own."""
    for alias in connections:
        view = transaction.non_atomic_requests(alias)(view)
    return view


@admin.register(Outcome)
class OutcomeAdmin(admin.ModelAdmin):
    """Lists outcomes, shows each beside the record of its key, and forgets both.

    Without `using`, it reads the only Django alias that tasks name in idempotency_transaction, or
    the default database if they name none or several.
    """

    #: Database alias; None for the default above.
    using: ClassVar[str | None] = None

    list_display = ("record_key", "state", "task_id", "attempt", "finished", "kept_until")
    list_filter = ("state", TaskFilter)
    # The only order with an index.
    ordering = ("-expires_at",)
    sortable_by = ()
    search_fields = ("task_id",)
    search_help_text = "A key, a task, or a whole task id (a full table scan)"
    fields = readonly_fields = ("record_key",)
    actions = ("forget_selected", "rerun_selected")
    paginator = BoundedPaginator
    show_full_result_count = False
    if hasattr(admin, "ShowFacets"):  # Django 5.0; facets would be counted
        show_facets = admin.ShowFacets.NEVER

    def has_add_permission(self, request: HttpRequest, obj: Outcome | None = None) -> bool:
        """Outcomes are not added, changed or deleted by hand; they can only be forgotten."""
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
        found = queryset.filter(**chosen)
        if ids and not found.exists():  # a key that may run again has a row for each message
            found = queryset.filter(record_key__in=[str(key) for _, key in keys if key is not None])
        return found, False

    @admin.display(description="finished")
    def finished(self, outcome: Outcome) -> str:
        """Returns the time of the outcome's commit."""
        return _time(outcome.finished_at)

    @admin.display(description="kept until")
    def kept_until(self, outcome: Outcome) -> str:
        """Returns the end of the retention."""
        return _time(outcome.expires_at)

    @_without_transaction
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Lists outcomes, and performs the actions."""
        return super().changelist_view(request, extra_context)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Shows one outcome beside its record."""
        context = {**(extra_context or {}), "may_forget": self.has_forget_permission(request)}
        outcome = self.get_object(request, unquote(object_id))
        if outcome is not None and self.has_view_permission(request, outcome):
            context["shown"] = shown = ShownOutcome(outcome)
            sees_result = request.user.has_perm("celery_idempotent.view_outcome_result")
            hidden = {"hidden": "You may not see results and errors."}
            context["result"] = shown.result if sees_result else hidden
            context["is_step"] = len(outcome.pk) > 32
        return super().change_view(request, object_id, form_url, context)

    @admin.action(description="Forget selected outcomes", permissions=["forget"])
    def forget_selected(self, request: HttpRequest, queryset: QuerySet[Outcome]) -> Any:
        """Asks whether to forget the selected outcomes, and forgets them if the user confirms."""
        return self._confirm_and_act(request, queryset, _FORGET)

    @admin.action(description="Run selected calls again", permissions=["forget"])
    def rerun_selected(self, request: HttpRequest, queryset: QuerySet[Outcome]) -> Any:
        """Asks whether to run the selected calls again, and does so if the user confirms."""
        return self._confirm_and_act(request, queryset, _RERUN)

    def _confirm_and_act(
        self, request: HttpRequest, queryset: QuerySet[Outcome], action: _Action
    ) -> HttpResponse | None:
        if "shown" in request.POST:
            self._act_on_shown(request, action)
            return None  # to the list
        outcomes = list(queryset[: self.list_max_show_all])
        sees_arguments = request.user.has_perm("celery_idempotent.view_outcome_result")
        context = {
            **self.admin_site.each_context(request),
            "title": "Are you sure?",
            "opts": self.opts,
            "shown": [ShownOutcome(outcome) for outcome in outcomes],
            "action": action.name,
            "with_arguments": action is _RERUN and sees_arguments,
            "has_completed": any(each.state == State.COMPLETED for each in outcomes),
        }
        template = "admin/celery_idempotent/outcome/confirm.html"
        return TemplateResponse(request, template, context)

    def _act_on_shown(self, request: HttpRequest, action: _Action) -> None:
        """Applies `action` to the confirmed outcomes that have not changed since."""
        number = 0
        for text in request.POST.getlist("shown")[: self.list_max_show_all]:
            try:
                key, case = self._act(request, text, action)
            except IdempotencyError as error:
                self.message_user(request, str(error), messages.ERROR)
                break
            number += case == action.success
            if case != action.success:
                # Django begins a message with a capital letter, which would change the key.
                self.message_user(request, f"Outcome of {key}: {_CASES[case]}", messages.WARNING)
        if number:
            done = plural(number, action.noun)
            self.message_user(request, f"{done} {_CASES[action.success]}")

    def _act(self, request: HttpRequest, text: str, action: _Action) -> tuple[str, str]:
        """Applies `action` to an outcome if unchanged since shown; returns its key and the case.

        Args:
            text: the version of the outcome that was shown.
        """
        try:
            pk, owner, *_ = map(str, json.loads(text))
        except (ValueError, TypeError):
            raise SuspiciousOperation from None
        outcome = self.get_object(request, pk)
        if outcome is None:
            return pk, changes.ABSENT
        shown = ShownOutcome(outcome)
        if shown.found is None:
            return outcome.record_key, _UNKNOWN
        if shown.record_error is not None:
            raise shown.record_error
        # A record that has expired meanwhile makes no difference.
        if outcome.owner != owner or (shown.view is not None and shown.version != text):
            return outcome.record_key, changes.CHANGED
        case = action.act(shown, request)
        if case == action.success:
            _log(request, outcome, action)
        return outcome.record_key, case


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
