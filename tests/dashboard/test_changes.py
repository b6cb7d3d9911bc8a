"""Forgetting, and what it shares with running again: tokens, rights, versions; log and signal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import HTTPConnection

from celery_idempotent import signals
from celery_idempotent.core.record import State
from celery_idempotent.dashboard import Access
from tests.dashboard.conftest import Open, fields_of
from tests.monitoring.conftest import Shop, received
from tests.waiting import eventually

each_action = pytest.mark.parametrize("action", ["forget", "rerun"])


@pytest.fixture
def key(shop: Shop) -> str:
    """The key of a failed call whose message is kept."""
    shop.app.conf.task_always_eager = False
    return shop.receive(shop.charge, 42, 13)


@pytest.fixture
def unchanged(shop: Shop, key: str) -> Iterator[None]:
    """Nothing happens to it."""
    yield
    assert shop.charge.idempotency_record(42, 13) is not None
    assert shop.published() == []


def delete(web: httpx.Client, key: str, **headers: str) -> httpx.Response:
    """Forgets the record by the API."""
    return web.delete(f"/api/records/{key}", headers=headers)


def required(web: httpx.Client, key: str) -> dict[str, str]:
    """Returns what the API requires for that."""
    headers = web.get(f"/api/records/{key}").headers
    return {"x-csrf-token": headers["x-csrf-token"], "if-match": headers["etag"]}


@each_action
@pytest.mark.parametrize(
    "changed", ["missing", "forged", "of another user", "of another server", "of another record"]
)
@pytest.mark.usefixtures("unchanged")
def test_a_forged_token_is_refused(
    shop: Shop, open_dashboard: Open, key: str, action: str, changed: str
) -> None:
    def authorize(connection: HTTPConnection) -> Access:
        return Access(connection.headers["x-user"], forget=True)

    def token_of(web: httpx.Client, key: str = key, user: str = "ann") -> str:
        return fields_of(web.get(f"/{action}?key={key}", headers={"x-user": user}))["token"]

    web, other = open_dashboard(authorize=authorize), open_dashboard(authorize=authorize)
    web.headers["x-user"] = "ann"
    own, etag = token_of(web), required(web, key)["if-match"]
    token = {
        "missing": "",
        "forged": ("X" if own[0] != "X" else "Y") + own[1:],
        "of another user": token_of(web, user="bea"),
        "of another server": token_of(other),
        "of another record": token_of(web, shop.receive(shop.charge, 43, 13)),
    }[changed]

    if changed != "of another record":  # whose form changes that one
        assert web.post(f"/{action}", data={"token": token}).status_code == 403
    refused = delete(web, key, **{"x-csrf-token": token, "if-match": etag})
    assert refused.status_code == 403


@each_action
@pytest.mark.parametrize(
    "options",
    [
        {"authorize": lambda _: Access("ann", results=True)},
        {"authorize": lambda _: Access("ann", forget=True, results=True), "read_only": True},
        {"auth": "ann:secret", "read_only": True},
    ],
    ids=["without the right", "read-only", "read-only with basic auth"],
)
@pytest.mark.usefixtures("unchanged")
def test_who_may_not_change_records_finds_no_way_to(
    open_dashboard: Open, options: dict[str, Any], key: str, action: str
) -> None:
    web = open_dashboard(secret_key="of all", **options)
    if "auth" in options:
        web.auth = ("ann", "secret")
    allowed = open_dashboard(secret_key="of all", authorize=lambda _: Access("ann", forget=True))
    form = fields_of(allowed.get(f"/{action}?key={key}"))
    headers = required(allowed, key)

    for page in (f"/records/{key}", "/records?state=FAILED"):
        for way in ("/forget", "Run again"):
            assert way not in web.get(page).text
    assert web.get(f"/{action}?key={key}").status_code == 403
    assert web.post(f"/{action}", data={**form, "repeat": "yes"}).status_code == 403
    assert "x-csrf-token" not in web.get(f"/api/records/{key}").headers
    assert delete(web, key, **headers).status_code == 403


@each_action
def test_a_changed_record_is_kept(shop: Shop, web: httpx.Client, key: str, action: str) -> None:
    form, headers = fields_of(web.get(f"/{action}?key={key}")), required(web, key)
    shop.charge.idempotency_forget(42, 13)
    shop.receive(shop.charge, 42, 13)

    response = web.post(f"/{action}", data=form)
    assert (response.status_code, "it has changed" in response.text) == (409, True)
    response = delete(web, key, **headers)
    assert (response.status_code, "has changed" in response.json()["error"]) == (412, True)
    assert shop.charge.idempotency_record(42, 13) is not None
    assert shop.published() == []


def test_the_api_requires_a_token_and_the_etag(shop: Shop, web: httpx.Client, key: str) -> None:
    headers = required(web, key)
    token = {"x-csrf-token": headers["x-csrf-token"]}

    assert delete(web, key).status_code == 403
    assert delete(web, key, **{"if-match": headers["if-match"]}).status_code == 403
    assert delete(web, key, **token).status_code == 428
    assert delete(web, key, **token, **{"if-match": '"F-1"'}).status_code == 412
    assert shop.charge.idempotency_record(42, 13) is not None
    response = delete(web, key, **headers)

    assert (response.status_code, response.json()["case"]) == (200, "forgotten")
    assert shop.charge.idempotency_record(42, 13) is None


def confirm(web: httpx.Client, query: str, **fields: str) -> httpx.Response:
    """Opens the question, and answers it with yes."""
    form = fields_of(web.get(f"/forget?{query}"))
    return web.post("/forget", data={**form, **fields})


def test_one_record_is_forgotten_after_a_question(
    shop: Shop, open_dashboard: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "celery_idempotent")
    shop.charge.apply((42, 999))
    record = shop.charge.idempotency_record(42, 999)
    web = open_dashboard(authorize=lambda _: Access("ann\n", forget=True))

    question = web.get(f"/forget?key={record.key}")
    assert "Forget 1 record?" in question.text
    assert shop.charge.idempotency_record(42, 999) is not None
    with received(signals.forgotten) as sent:
        response = web.post("/forget", data=fields_of(question))

    assert (response.status_code, "1 record forgotten" in response.text) == (200, True)
    assert shop.charge.idempotency_record(42, 999) is None
    (details,) = sent
    assert (details["user"], details["sender"]) == ("ann\n", shop.charge)
    assert (details["key"], details["task_id"]) == (record.key, record.task_id)
    (line,) = [line for line in caplog.messages if "forgotten" in line]
    assert line.startswith(f"{record.key}: task {record.task_id} (attempt 1) is forgotten by ")
    assert line.endswith("'ann\\n' (COMPLETED)")


def test_many_records_are_forgotten_by_a_filter(shop: Shop, web: httpx.Client) -> None:
    for number in range(30):
        shop.charge.apply((number, 13))
    shop.charge.apply((99, 999))

    question = eventually(
        lambda: "Forget 30 records?" in (page := web.get("/forget?state=FAILED").text) and page,
        "the index has the records",
    )
    assert "and 10 more" in question
    with received(signals.forgotten) as sent:
        assert "30 records forgotten" in confirm(web, "state=FAILED").text
    assert len(sent) == 30
    (left,) = web.get("/api/records").json()["records"]
    assert left["state"] == "COMPLETED"


def test_records_are_selected_one_by_one(shop: Shop, web: httpx.Client) -> None:
    for number in range(3):
        shop.charge.apply((number, 999))
    keys = [str(shop.charge.idempotency_key_of(number, 999)) for number in range(3)]
    eventually(
        lambda: all(f'name="key" value="{key}"' in web.get("/records").text for key in keys),
        "the page shows the records",
    )

    response = web.get("/forget", params={"key": keys[:2]})
    assert "Forget 2 records?" in response.text
    web.post("/forget", data=fields_of(response))

    left = [shop.charge.idempotency_record(number, 999) is not None for number in range(3)]
    assert left == [False, False, True]


def test_a_filter_is_required(web: httpx.Client) -> None:
    assert web.get("/forget").status_code == 400


def test_a_record_that_is_gone_is_absent(shop: Shop, web: httpx.Client) -> None:
    shop.charge.apply((42, 999))
    key = shop.charge.idempotency_key_of(42, 999)
    form, headers = fields_of(web.get(f"/forget?key={key}")), required(web, str(key))
    shop.charge.idempotency_forget(42, 999)

    assert "already absent" in web.post("/forget", data=form).text
    assert web.delete(f"/api/records/{key}", headers=headers).status_code == 404


def test_a_running_record_is_kept_unless_requested(shop: Shop, web: httpx.Client) -> None:
    key = shop.begin(shop.charge, 42, 999)

    assert "it is running" in confirm(web, f"key={key}").text
    assert shop.charge.idempotency_record(42, 999).state is State.STARTED
    assert "1 record forgotten" in confirm(web, f"key={key}", force="yes").text
    assert shop.charge.idempotency_record(42, 999) is None

    path, headers = f"/api/records/{shop.begin(shop.charge, 42, 999)}", required(web, str(key))
    assert web.delete(path, headers=headers).json()["case"] == "running"
    assert web.delete(f"{path}?force=true", headers=headers).json()["case"] == "forgotten"


def test_an_unreadable_record_is_forgotten(shop: Shop, web: httpx.Client) -> None:
    key = "shop.charge:" + "x" * 22
    shop.client.set(f"idem:{key}", "Znewer")

    assert "cannot be read" in web.get(f"/records/{key}").text
    assert "1 record forgotten" in confirm(web, f"key={key}").text
    assert not shop.client.exists(f"idem:{key}")
