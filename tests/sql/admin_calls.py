"""Tests of the admin of outcomes, in a process with Django; prints the failures as JSON.

python -m tests.sql.admin_calls DATABASE_URL REDIS_URL
"""

from __future__ import annotations

import logging
import re
import sys
from html import unescape
from typing import Any
from unittest.mock import patch
from urllib.parse import quote
from uuid import uuid4

from tests.sql.admin_site import set_up
from tests.sql.databases import dump_failures

app = set_up(sys.argv[1], sys.argv[2])

from celery.app.trace import build_tracer  # noqa: E402 - Django has to be set up
from django.contrib.admin.models import LogEntry  # noqa: E402 - Django has to be set up
from django.contrib.auth.models import Permission, User  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import connection  # noqa: E402
from django.test import Client  # noqa: E402
from django.test.utils import CaptureQueriesContext, override_settings  # noqa: E402

from celery_idempotent import StoreUnavailableError, signals  # noqa: E402
from celery_idempotent.contrib.django import admin as outcome_admin  # noqa: E402
from celery_idempotent.contrib.django.models import Outcome  # noqa: E402
from celery_idempotent.store import commands  # noqa: E402
from celery_idempotent.store.inspection.record_reader import RecordReader  # noqa: E402
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


#: Whether there are a row and a record.
FORGOTTEN, KEPT = [False, False], [True, True]
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
        return f"{LIST}{quote(self.row.pk)}/{page}/"

    def ask(self, client: Client = OPERATOR, action: str = "forget") -> Any:
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


def test_an_outcome_is_shown_beside_its_record() -> None:
    hostile = f"<img src={uuid4().hex}>"
    case, declined = Case(task_id=hostile), Case(13)
    listed = OPERATOR.get(LIST).content.decode()
    asked = case.ask().content.decode()
    page = OPERATOR.get(case.path("change")).content.decode()
    viewed = VIEWER.get(case.path("change")).content.decode()
    failed = OPERATOR.get(declined.path("change")).content.decode()
    assert str(case.key) in listed
    assert page.count("<td>COMPLETED</td>") == 2
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "Declined: &lt;script&gt;" in failed
    # Results need a permission.
    assert "alert(1)" not in viewed
    assert "You may not see results" in viewed
    assert [name.count("forget_selected") for name in (page, viewed)] == [1, 0]
    # Hostile texts are escaped.
    assert f"x3ci\\x3e{case.order}" in page
    assert all(hostile.replace("<", "&lt;")[:-1] in each for each in (listed, page, viewed))
    for text in (hostile, "<script>alert", f"<i>{case.order}"):
        assert not any(text in each for each in (listed, asked, page, viewed, failed))


def test_nobody_adds_changes_or_deletes() -> None:
    case = Case()
    root = User.objects.create_superuser(uuid4().hex)
    client = Client()
    client.force_login(root)
    assert client.get(f"{LIST}add/").status_code == 403
    assert client.post(case.path("change"), {"record_key": "x"}).status_code == 403
    assert client.post(case.path("delete"), {"post": "yes"}).status_code == 403
    delete = {"action": "delete_selected", "_selected_action": case.row.pk, "post": "yes"}
    client.post(LIST, delete)
    assert case.exists == KEPT
    actions = re.findall(r'<option value="(\w+_selected)"', client.get(LIST).content.decode())
    assert actions == ["forget_selected", "rerun_selected"]


def test_forget_needs_permissions_a_post_and_a_token() -> None:
    case = Case()
    fields = case.confirmation()
    strangers = (VIEWER, client_of(FORGET), client_of(), Client())
    unprotected = client_of(VIEW, FORGET, csrf=True)
    # To a user who may only view outcomes, Django shows the list, which has no actions.
    expected = [200, 403, 403, 302]
    assert [case.ask(client).status_code for client in strangers] == expected
    assert [client.post(LIST, fields).status_code for client in strangers] == expected
    assert OPERATOR.get(LIST, fields).status_code == 302
    without_token = {name: fields[name] for name in fields if name != "csrfmiddlewaretoken"}
    assert unprotected.post(LIST, without_token).status_code == 403
    for text in ("", "{}", "1", "[1]", '["a"'):
        assert OPERATOR.post(LIST, fields | {"shown": text}).status_code == 400
    assert case.exists == KEPT


def test_forget_deletes_the_record_and_the_row() -> None:
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
    name = OPERATOR.user.get_username()
    for case in (both, alone):
        assert forget(case.confirmation()) == "1 outcome forgotten"
        assert case.exists == FORGOTTEN
        assert audit[-1].startswith(str(case.key))
        assert f" is forgotten by {name!r} (" in audit[-1]
    assert sent == [[str(both.key), name], [str(alone.key), name]]
    entries = LogEntry.objects.filter(object_repr=str(both.key), user=OPERATOR.user)
    assert entries.count() == 1


def test_run_again_publishes_the_message() -> None:
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
    again = "1 call published: it runs again"
    question = "Outcome of KEY: kept: confirm that its effect is to be repeated"
    assert (texts, published) == ([again, question, again], 2)
    assert [failed.exists, completed.exists] == [KEPT, KEPT]
    assert sent == [OPERATOR.user.get_username()] * 2
    entries = LogEntry.objects.filter(object_repr=str(failed.key), change_message="Run again")
    assert entries.count() == 1
    assert fields_of(failed.ask(VIEWER, "rerun")).get("shown", []) == []
    for client, sees_arguments in ((OPERATOR, True), (client_of(VIEW, FORGET), False)):
        asked = failed.ask(client, "rerun").content.decode()
        assert (f"&quot;{failed.order}&quot;" in asked) is sees_arguments


def test_what_has_changed_is_kept() -> None:
    def again(case: Case) -> None:
        charge.idempotency_forget(case.order)
        charge.apply((case.order,))

    changed = "Outcome of KEY: kept: it has changed since it was shown"
    for lost, change, message, exists in (
        (False, again, changed, KEPT),
        (True, lambda case: charge.apply((case.order,)), changed, KEPT),
        (False, lambda case: charge.idempotency_forget(case.order), ": already absent", FORGOTTEN),
        (False, Case.lose_record, "1 outcome forgotten", FORGOTTEN),
    ):
        case = Case()
        if lost:
            case.lose_record()
        fields = case.confirmation()
        change(case)
        assert message in forget(fields).replace(str(case.key), "KEY")
        assert case.exists == exists


def test_what_is_running_is_kept() -> None:
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
    assert "kept: it is running" in forget(case.confirmation())
    assert case.exists == KEPT


def test_selected_outcomes_are_forgotten() -> None:
    cases = [Case() for _ in range(3)]
    chosen = [case.row.pk for case in cases[:2]]
    question, refused = (ask(client, "forget", *chosen) for client in (OPERATOR, VIEWER))
    assert len(fields_of(question).get("shown", [])) == 2
    assert fields_of(refused).get("shown", []) == []
    assert forget(fields_of(question)) == "2 outcomes forgotten"
    assert [case.exists for case in cases] == [FORGOTTEN, FORGOTTEN, KEPT]


def test_the_row_of_one_message_is_forgotten() -> None:
    """A key that may run again has a row for each message."""
    order = uuid4().hex
    ship.apply((order,), task_id="first")
    ship.apply((order,), task_id="second")
    rows = Outcome.objects.filter(record_key=str(ship.idempotency_key_of(order)))
    first = rows.get(task_id="first")
    assert forget(fields_of(ask(OPERATOR, "forget", first.pk))) == "1 outcome forgotten"
    assert [row.task_id for row in rows.all()] == ["second"]


def test_without_redis_the_row_is_shown_and_kept() -> None:
    case = Case()
    fields = case.confirmation()
    away = StoreUnavailableError("Redis is away")
    with patch.object(RecordReader, "open", side_effect=away):
        page = OPERATOR.get(case.path("change"))
        assert (page.status_code, "Redis is away" in page.content.decode()) == (200, True)
        assert forget(fields) == "Redis is away"
    assert case.row is not None


def test_search_and_filters() -> None:
    case, other = Case(), Case(13)
    prefix = charge.idempotency_configuration.executor.store.config.prefix
    for query, expected in {
        f"q={case.key}": [True, False],
        f"q={prefix}:{case.key}": [True, False],
        f"q={case.row.task_id}": [True, False],
        "q=shop.charge": [True, True],
        "task=shop.charge": [True, True],
        "state=FAILED": [False, True],
        "q=shop.ship": [False, False],
        "task=shop.ship": [False, False],
        "q=%27%3B--": [False, False],
    }.items():
        page = OPERATOR.get(f"{LIST}?{query}").content.decode()
        assert [each.row.pk in page for each in (case, other)] == expected, query
    # A key that may run again has a row for each message.
    Outcome.objects.filter(pk=case.row.pk).update(id="of a message")
    assert "/of%20a%20message/" in OPERATOR.get(f"{LIST}?q={case.key}").content.decode()


def test_a_list_neither_counts_the_table_nor_reads_bodies() -> None:
    for _ in range(4):
        Case()
    with CaptureQueriesContext(connection) as queries:
        OPERATOR.get(LIST)
    found = [each["sql"] for each in queries if "celery_idempotency_outcomes" in each["sql"]]
    assert [sql for sql in found if "COUNT(" in sql and "LIMIT" not in sql] == []
    assert [sql for sql in found if "body" in sql] == []
    assert len(found) == 2
    with patch.object(outcome_admin, "MAX_COUNT", 3):
        rows = Outcome.objects.order_by("-expires_at")
        assert outcome_admin.BoundedPaginator(rows, 2).count == 3


with override_settings(DEBUG=False):
    dump_failures(vars())
