"""Requests to the admin of outcomes; prints what has become of each as JSON.

python -m tests.sql.admin_calls DATABASE_URL REDIS_URL
"""

from __future__ import annotations

import logging
import re
import sys
from html import unescape
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from tests.sql.admin_site import set_up
from tests.sql.databases import dump_cases

app = set_up(sys.argv[1], sys.argv[2])

from celery.app.trace import build_tracer  # noqa: E402 - Django has to be set up
from django.contrib.admin.models import LogEntry  # noqa: E402 - Django has to be set up
from django.contrib.auth.models import Permission, User  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import connection  # noqa: E402
from django.test import Client  # noqa: E402
from django.test.utils import CaptureQueriesContext, override_settings  # noqa: E402

from celery_idempotent import signals  # noqa: E402
from celery_idempotent.contrib.django import admin as outcome_admin  # noqa: E402
from celery_idempotent.contrib.django.models import Outcome  # noqa: E402
from celery_idempotent.store import commands  # noqa: E402
from celery_idempotent.store.run_sync import run_sync  # noqa: E402

call_command("migrate", verbosity=0)
charge, ship = app.tasks["shop.charge"], app.tasks["shop.ship"]
LIST = "/admin/celery_idempotent/outcome/"
VIEW, FORGET, RESULT = "view_outcome", "forget_outcome", "view_outcome_result"


def client_of(*permissions: str, csrf: bool = False) -> Client:
    user = User.objects.create_user(uuid4().hex, is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client(enforce_csrf_checks=csrf)
    client.force_login(user)
    client.user = user
    return client


OPERATOR = client_of(VIEW, FORGET, RESULT)
VIEWER = client_of(VIEW)


class Case:
    """An order that was charged: its row, and its record."""

    def __init__(self, amount: int = 1, **options: Any) -> None:
        self.order = uuid4().hex
        charge.apply((self.order, amount), **options)
        self.key = charge.idempotency_key_of(self.order, amount)

    @property
    def row(self) -> Outcome | None:
        return Outcome.objects.filter(record_key=str(self.key)).first()

    @property
    def exists(self) -> list[bool]:
        """Whether there are a row and a record."""
        return [self.row is not None, charge.idempotency_record(self.order) is not None]

    def path(self, page: str) -> str:
        assert self.row is not None
        return f"{LIST}{quote(self.row.pk)}/{page}/"

    def ask(self, client: Client = OPERATOR, action: str = "forget") -> Any:
        assert self.row is not None
        return ask(client, action, self.row.pk)

    def lose_record(self) -> None:
        run_sync(charge.idempotency_configuration.executor.store.execute(commands.forget(self.key)))

    def confirmation(self) -> dict[str, Any]:
        return fields_of(self.ask())


def ask(client: Client, action: str, *ids: str) -> Any:
    """Returns the response to an action, as the list and the page of an outcome send it."""
    return client.post(LIST, {"action": f"{action}_selected", "_selected_action": ids})


def fields_of(response: Any) -> dict[str, Any]:
    """Returns the fields of a confirmation."""
    found = re.findall(r'name="(\w+)" value="([^"]*)"', response.content.decode())
    fields: dict[str, Any] = {}
    for name, value in found:
        fields.setdefault(name, []).append(unescape(value))
    return fields


def forget(fields: dict[str, Any]) -> str:
    """Answers a confirmation; returns the messages."""
    response = OPERATOR.post(LIST, fields, follow=True)
    found = re.findall(
        r'<li class="(?:success|warning|error|info)">(.*?)</li>', response.content.decode()
    )
    return " ".join(map(unescape, found)) or str(response.status_code)


def pages() -> dict[str, Any]:
    hostile = f"<img src={uuid4().hex}>"
    case, declined = Case(task_id=hostile), Case(13)
    listed = OPERATOR.get(LIST).content.decode()
    asked = case.ask().content.decode()
    page = OPERATOR.get(case.path("change")).content.decode()
    viewed = VIEWER.get(case.path("change")).content.decode()
    failed = OPERATOR.get(declined.path("change")).content.decode()
    return {
        "list": str(case.key) in listed,
        "both": page.count("<td>COMPLETED</td>"),
        "result": "&lt;script&gt;alert(1)&lt;/script&gt;" in page,
        "label": f"x3ci\\x3e{case.order}" in page,
        "task_id": [hostile.replace("<", "&lt;")[:-1] in each for each in (listed, page, viewed)],
        "unescaped": [
            text
            for text in (hostile, "<script>alert", f"<i>{case.order}")
            if any(text in each for each in (listed, asked, page, viewed, failed))
        ],
        "viewer_sees_result": "alert(1)" in viewed,
        "viewer_reads_why": "You may not see results" in viewed,
        "forget_buttons": [name.count("forget_selected") for name in (page, viewed)],
        "error": "Declined: &lt;script&gt;" in failed,
    }


def read_only() -> dict[str, Any]:
    case = Case()
    root = User.objects.create_superuser(uuid4().hex)
    client = Client()
    client.force_login(root)
    return {
        "add": client.get(f"{LIST}add/").status_code,
        "change": client.post(case.path("change"), {"record_key": "x"}).status_code,
        "delete": client.post(case.path("delete"), {"post": "yes"}).status_code,
        "action": client.post(
            LIST, {"action": "delete_selected", "_selected_action": case.row.pk, "post": "yes"}
        ).status_code,
        "exists": case.exists,
        "actions": re.findall(r'<option value="(\w+_selected)"', client.get(LIST).content.decode()),
    }


def rights() -> dict[str, Any]:
    case = Case()
    fields = case.confirmation()
    strangers = (VIEWER, client_of(FORGET), client_of(), Client())
    unprotected = client_of(VIEW, FORGET, csrf=True)
    return {
        "ask": [case.ask(client).status_code for client in strangers],
        "forget": [client.post(LIST, fields).status_code for client in strangers],
        "get": OPERATOR.get(LIST, fields).status_code,
        "without_token": unprotected.post(
            LIST, {name: fields[name] for name in fields if name != "csrfmiddlewaretoken"}
        ).status_code,
        "nonsense": [
            OPERATOR.post(LIST, fields | {"shown": text}).status_code
            for text in ("", "{}", "1", "[1]", '["a"')
        ],
        "exists": case.exists,
    }


def forgetting() -> dict[str, Any]:
    audit: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: audit.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("celery_idempotent.audit")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    sent: list[Any] = []
    signals.forgotten.connect(
        lambda **details: sent.append([details["key"], details["user"]]), weak=False
    )
    both, alone = Case(), Case()
    alone.lose_record()
    texts = [forget(case.confirmation()) for case in (both, alone)]
    name = OPERATOR.user.get_username()
    return {
        "messages": texts,
        "exist": [both.exists, alone.exists],
        "signals": sent == [[str(both.key), name], [str(alone.key), name]],
        "audit": [
            text.startswith(str(case.key)) and f" is forgotten by {name!r} (" in text
            for case, text in zip((both, alone), audit, strict=True)
        ],
        "log_entries": LogEntry.objects.filter(
            object_repr=str(both.key), user=OPERATOR.user
        ).count(),
    }


def running_again() -> dict[str, Any]:
    app.conf.update(task_always_eager=False, result_extended=True)
    sent: list[str] = []
    signals.rerun.connect(lambda **details: sent.append(details["user"]), weak=False)
    failed, completed = Case(), Case()
    for case, amount in ((failed, 13), (completed, 1)):
        charge.idempotency_forget(case.order)
        tracer = build_tracer(charge.name, charge, app.loader, "here", app=app)
        request = {"id": case.order, "args": (case.order, amount), "kwargs": {}, "hostname": "here"}
        request |= {"delivery_info": {"exchange": "", "routing_key": "celery"}, "task": charge.name}
        tracer(case.order, (case.order, amount), {}, request)
    with app.connection_for_read() as broker:
        texts = []
        for case in (failed, completed, completed):
            fields = fields_of(case.ask(action="rerun"))
            fields.pop("repeat", None)  # a checkbox
            if len(texts) == 2:
                fields["repeat"] = "yes"
            texts.append(forget(fields).replace(str(case.key), "KEY"))
        published = broker.default_channel.client.llen("celery")
        broker.default_channel.client.delete("celery")
    app.conf.task_always_eager = True
    return {
        "messages": texts,
        "published": published,
        "exist": [failed.exists, completed.exists],
        "signals": sent == [OPERATOR.user.get_username()] * 2,
        "log_entries": LogEntry.objects.filter(
            object_repr=str(failed.key), change_message="Run again"
        ).count(),
        "viewer": fields_of(failed.ask(VIEWER, "rerun")).get("shown", []),
        "arguments": [
            f"&quot;{failed.order}&quot;" in failed.ask(client, "rerun").content.decode()
            for client in (OPERATOR, client_of(VIEW, FORGET))
        ],
    }


def changed() -> dict[str, Any]:
    def again(case: Case) -> None:
        charge.idempotency_forget(case.order)
        charge.apply((case.order,))

    def record_appears(case: Case) -> None:
        charge.apply((case.order,))

    texts = []
    cases = [Case(), Case(), Case()]
    cases[1].lose_record()
    for case, change in zip(
        cases,
        (again, record_appears, lambda case: charge.idempotency_forget(case.order)),
        strict=True,
    ):
        fields = case.confirmation()
        change(case)
        texts.append(forget(fields).replace(str(case.key), "KEY"))
    return {"messages": texts, "exist": [case.exists for case in cases]}


def record_expires_meanwhile() -> list[Any]:
    case = Case()
    fields = case.confirmation()
    case.lose_record()
    return [forget(fields), case.exists]


def running() -> list[Any]:
    case = Case()
    case.lose_record()
    store = charge.idempotency_configuration.executor.store
    begin = commands.begin(
        case.key,
        execution_id=b"%08d" % 1,
        unanswered_ids=b"",
        root=bytes(8),
        task_id="running",
        worker="celery@here/1",
        lease_ms=60_000,
        retention_ms=60_000,
        max_attempts=5,
        error_ms=60_000,
    )
    assert run_sync(store.execute(begin)).case == "begun"
    return [forget(case.confirmation()).replace(str(case.key), "KEY"), case.exists]


def selected() -> dict[str, Any]:
    cases = [Case() for _ in range(3)]
    chosen = [case.row.pk for case in cases[:2]]
    question, refused = (ask(client, "forget", *chosen) for client in (OPERATOR, VIEWER))
    return {
        "asked": len(fields_of(question).get("shown", [])),
        "viewer": len(fields_of(refused).get("shown", [])),
        "message": forget(fields_of(question)),
        "exist": [case.exists for case in cases],
    }


def messages_of_a_turn() -> dict[str, Any]:
    """A key that may run again has a row for each message."""
    order = uuid4().hex
    ship.apply((order,), task_id="first")
    ship.apply((order,), task_id="second")
    rows = Outcome.objects.filter(record_key=str(ship.idempotency_key_of(order)))
    first = rows.get(task_id="first")
    text = forget(fields_of(ask(OPERATOR, "forget", first.pk)))
    return {"message": text, "left": [row.task_id for row in rows.all()]}


def redis_away() -> dict[str, Any]:
    case = Case()
    fields = case.confirmation()
    from celery_idempotent.store.inspection.record_reader import RecordReader

    reader = RecordReader.open
    RecordReader.open = lambda store: (_ for _ in ()).throw(unavailable())
    try:
        page = OPERATOR.get(case.path("change"))
        return {
            "page": [page.status_code, "Redis is away" in page.content.decode()],
            "message": forget(fields),
            "row": case.row is not None,
        }
    finally:
        RecordReader.open = reader


def unavailable() -> Exception:
    from celery_idempotent import StoreUnavailableError

    return StoreUnavailableError("Redis is away")


def searching() -> dict[str, Any]:
    case, other = Case(), Case(13)
    prefix = charge.idempotency_configuration.executor.store.config.prefix

    def keys(query: str) -> list[bool]:
        page = OPERATOR.get(f"{LIST}?{query}").content.decode()
        return [str(each.key) in page for each in (case, other)]

    return {
        "key": keys(f"q={case.key}"),
        "name": keys(f"q={prefix}:{case.key}"),
        "task id": keys(f"q={case.row.task_id}"),
        "task": keys("q=shop.charge"),
        "other task": keys("q=shop.ship"),
        "state": keys("state=FAILED"),
        "filter": keys("task=shop.charge"),
        "filter other": keys("task=shop.ship"),
        "nothing": keys("q=%27%3B--"),
    }


def statements() -> dict[str, Any]:
    """The statements of a list: none counts the whole table, none reads a body."""
    with CaptureQueriesContext(connection) as queries:
        OPERATOR.get(LIST)
    found = [each["sql"] for each in queries if "celery_idempotency_outcomes" in each["sql"]]
    outcome_admin.MAX_COUNT = 3
    counted = outcome_admin.BoundedPaginator(Outcome.objects.order_by("-expires_at"), 2).count
    return {
        "counted": counted,
        "counts": [sql for sql in found if "COUNT(" in sql and "LIMIT" not in sql],
        "bodies": [sql for sql in found if "body" in sql],
        "statements": len(found),
        "more": Outcome.objects.count() > 3,
    }


with override_settings(DEBUG=False):
    dump_cases(
        pages,
        read_only,
        rights,
        forgetting,
        changed,
        record_expires_meanwhile,
        running,
        running_again,
        selected,
        messages_of_a_turn,
        redis_away,
        searching,
        statements,
    )
