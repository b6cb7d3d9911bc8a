"""Forgetting: one record or many, by form and by API; rights, tokens, changes, log and signal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import HTTPConnection

from celery_idempotent import signals
from celery_idempotent.core.record import State
from celery_idempotent.dashboard import Access
from tests.dashboard.conftest import fields_of
from tests.monitoring.conftest import Shop
from tests.waiting import eventually

Open = Callable[..., httpx.Client]


def confirm(web: httpx.Client, query: str, **fields: str) -> httpx.Response:
    """Opens the question, and answers it with yes."""
    form = fields_of(web.get(f"/forget?{query}"))
    return web.post("/forget", data={**form, **fields})


@pytest.fixture
def forgotten() -> Iterator[list[dict[str, Any]]]:
    """The arguments of the signals `forgotten`."""
    received: list[dict[str, Any]] = []

    def receive(**details: Any) -> None:
        received.append(details)

    signals.forgotten.connect(receive)
    yield received
    signals.forgotten.disconnect(receive)


def test_one_record_is_forgotten_after_a_question(
    shop: Shop,
    open_dashboard: Open,
    forgotten: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "celery_idempotent")
    shop.charge.apply((42, 999))
    record = shop.charge.idempotency_record(42, 999)
    web = open_dashboard(authorize=lambda _: Access("ann\n", forget=True))

    question = web.get(f"/forget?key={record.key}")
    assert "Forget 1 record?" in question.text
    assert shop.charge.idempotency_record(42, 999) is not None
    response = web.post("/forget", data=fields_of(question))

    assert (response.status_code, "1 record forgotten" in response.text) == (200, True)
    assert shop.charge.idempotency_record(42, 999) is None
    (details,) = forgotten
    assert (details["user"], details["key"], details["task_id"], details["sender"]) == (
        "ann\n",
        record.key,
        record.task_id,
        shop.charge,
    )
    (line,) = [line for line in caplog.messages if "forgotten" in line]
    assert line.startswith(f"{record.key}: task {record.task_id} (attempt 1) is forgotten by ")
    assert line.endswith("'ann\\n' (COMPLETED)")


def test_many_records_are_forgotten_by_a_filter(
    shop: Shop, web: httpx.Client, forgotten: list[dict[str, Any]]
) -> None:
    for number in range(30):
        shop.charge.apply((number, 13))
    shop.charge.apply((99, 999))

    question = eventually(
        lambda: "Forget 30 records?" in (page := web.get("/forget?state=FAILED").text) and page,
        "the index has the records",
    )
    assert "and 10 more" in question
    assert "30 records forgotten" in confirm(web, "state=FAILED").text
    assert len(forgotten) == 30
    assert [record["state"] for record in web.get("/api/records").json()["records"]] == [
        "COMPLETED"
    ]


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


def test_a_record_that_has_changed_since_is_kept(shop: Shop, web: httpx.Client) -> None:
    shop.charge.apply((42, 999))
    form = fields_of(web.get(f"/forget?key={shop.charge.idempotency_key_of(42, 999)}"))
    shop.charge.idempotency_forget(42, 999)
    shop.charge.apply((42, 999))

    response = web.post("/forget", data=form)

    assert (response.status_code, "it has changed" in response.text) == (409, True)
    assert shop.charge.idempotency_record(42, 999) is not None
    shop.charge.idempotency_forget(42, 999)
    assert "already absent" in web.post("/forget", data=form).text


def test_a_running_record_is_kept_unless_requested(shop: Shop, web: httpx.Client) -> None:
    key = shop.begin(shop.charge, 42, 999)

    assert "it is running" in confirm(web, f"key={key}").text
    assert shop.charge.idempotency_record(42, 999).state is State.STARTED
    assert "1 record forgotten" in confirm(web, f"key={key}", force="yes").text
    assert shop.charge.idempotency_record(42, 999) is None


def test_an_unreadable_record_is_forgotten(shop: Shop, web: httpx.Client) -> None:
    key = "shop.charge:" + "x" * 22
    shop.client.set(f"idem:{key}", "Znewer")

    assert "cannot be read" in web.get(f"/records/{key}").text
    assert "1 record forgotten" in confirm(web, f"key={key}").text
    assert not shop.client.exists(f"idem:{key}")


@pytest.mark.parametrize("change", ["missing", "forged", "of another user", "of another server"])
def test_a_forged_form_is_refused(shop: Shop, open_dashboard: Open, change: str) -> None:
    shop.charge.apply((42, 999))

    def authorize(connection: HTTPConnection) -> Access:
        return Access(connection.headers["x-user"], forget=True)

    web, other = open_dashboard(authorize=authorize), open_dashboard(authorize=authorize)
    web.headers["x-user"] = other.headers["x-user"] = "ann"
    path = f"/forget?key={shop.charge.idempotency_key_of(42, 999)}"
    token = fields_of(web.get(path))["token"]
    changed = {
        "missing": "",
        "forged": ("X" if token[0] != "X" else "Y") + token[1:],
        "of another user": fields_of(web.get(path, headers={"x-user": "bea"}))["token"],
        "of another server": fields_of(other.get(path))["token"],
    }[change]

    assert web.post("/forget", data={"token": changed}).status_code == 403
    assert shop.charge.idempotency_record(42, 999) is not None


@pytest.mark.parametrize(
    "options",
    [
        {"authorize": lambda _: Access("bea", results=True)},
        {"authorize": lambda _: Access("ann", forget=True), "read_only": True},
        {"auth": "ann:secret", "read_only": True},
    ],
    ids=["without the right", "read-only", "read-only with basic auth"],
)
def test_who_may_not_forget_finds_no_way_to(
    shop: Shop, open_dashboard: Open, options: dict[str, Any]
) -> None:
    shop.charge.apply((42, 999))
    key = shop.charge.idempotency_key_of(42, 999)
    web = open_dashboard(secret_key="of all", **options)
    if "auth" in options:
        web.auth = ("ann", "secret")
    allowed = open_dashboard(secret_key="of all", authorize=lambda _: Access("ann", forget=True))
    form = fields_of(allowed.get(f"/forget?key={key}"))

    for page in (f"/records/{key}", "/records?state=COMPLETED"):
        assert "/forget" not in web.get(page).text
    assert web.get(f"/forget?key={key}").status_code == 403
    assert web.post("/forget", data=form).status_code == 403
    response = web.get(f"/api/records/{key}")
    assert "x-csrf-token" not in response.headers
    headers = {"x-csrf-token": form["token"], "if-match": response.headers["etag"]}
    assert web.delete(f"/api/records/{key}", headers=headers).status_code == 403
    assert shop.charge.idempotency_record(42, 999) is not None


class TestApi:
    def test_a_record_is_deleted_with_its_etag_and_a_token(
        self, shop: Shop, web: httpx.Client, forgotten: list[dict[str, Any]]
    ) -> None:
        shop.charge.apply((42, 999))
        path = f"/api/records/{shop.charge.idempotency_key_of(42, 999)}"
        headers = web.get(path).headers
        token, etag = {"x-csrf-token": headers["x-csrf-token"]}, {"if-match": headers["etag"]}

        assert web.delete(path).status_code == 403
        assert web.delete(path, headers=etag).status_code == 403
        assert web.delete(path, headers=token).status_code == 428
        changed = web.delete(path, headers={**token, "if-match": '"C-1"'})
        assert (changed.status_code, "has changed" in changed.json()["error"]) == (412, True)
        response = web.delete(path, headers={**token, **etag})

        assert (response.status_code, response.json()["case"]) == (200, "forgotten")
        assert web.delete(path, headers={**token, **etag}).status_code == 404
        assert [details["user"] for details in forgotten] == ["local"]

    def test_a_token_is_of_one_record(self, shop: Shop, web: httpx.Client) -> None:
        paths = []
        for number in (1, 2):
            shop.charge.apply((number, 999))
            paths.append(f"/api/records/{shop.charge.idempotency_key_of(number, 999)}")
        etag, token = web.get(paths[0]).headers["etag"], web.get(paths[1]).headers["x-csrf-token"]

        headers = {"if-match": etag, "x-csrf-token": token}
        assert web.delete(paths[0], headers=headers).status_code == 403

    def test_a_running_record_is_deleted_by_force(self, shop: Shop, web: httpx.Client) -> None:
        path = f"/api/records/{shop.begin(shop.charge, 42, 999)}"
        headers = web.get(path).headers
        sent = {"x-csrf-token": headers["x-csrf-token"], "if-match": headers["etag"]}

        assert web.delete(path, headers=sent).json()["case"] == "running"
        assert web.delete(f"{path}?force=true", headers=sent).json()["case"] == "forgotten"
