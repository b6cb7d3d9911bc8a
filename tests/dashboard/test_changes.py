"""What forgetting and running again have in common: tokens, rights, versions of the record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import HTTPConnection

from celery_idempotent.dashboard import Access
from tests.dashboard.conftest import Open, fields_of
from tests.monitoring.conftest import Shop

#: For each form: the request to the API, and the status of its success.
ACTIONS = {
    "forget": ("DELETE", "", 200, "forgotten"),
    "rerun": ("POST", "/rerun", 202, "published"),
}
each_action = pytest.mark.parametrize("action", ACTIONS)


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


def change(web: httpx.Client, action: str, key: str, **headers: str) -> httpx.Response:
    """Changes the record by the API."""
    method, path, *_ = ACTIONS[action]
    return web.request(method, f"/api/records/{key}{path}", headers=headers)


def headers_of(web: httpx.Client, action: str, key: str) -> dict[str, str]:
    """Returns what the API requires for a change."""
    headers = web.get(f"/api/records/{key}{ACTIONS[action][1]}").headers
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
    own, etag = token_of(web), headers_of(web, action, key)["if-match"]
    token = {
        "missing": "",
        "forged": ("X" if own[0] != "X" else "Y") + own[1:],
        "of another user": token_of(web, user="bea"),
        "of another server": token_of(other),
        "of another record": token_of(web, shop.receive(shop.charge, 43, 13)),
    }[changed]

    if changed != "of another record":  # whose form changes that one
        assert web.post(f"/{action}", data={"token": token}).status_code == 403
    refused = change(web, action, key, **{"x-csrf-token": token, "if-match": etag})
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
    headers = headers_of(allowed, action, key)

    for page in (f"/records/{key}", "/records?state=FAILED"):
        text = web.get(page).text
        assert "/forget" not in text
        assert "Run again" not in text
    assert web.get(f"/{action}?key={key}").status_code == 403
    assert web.post(f"/{action}", data={**form, "repeat": "yes"}).status_code == 403
    assert "x-csrf-token" not in web.get(f"/api/records/{key}{ACTIONS[action][1]}").headers
    assert change(web, action, key, **headers).status_code == 403


@each_action
def test_a_record_that_has_changed_since_is_kept(
    shop: Shop, web: httpx.Client, key: str, action: str
) -> None:
    form, headers = fields_of(web.get(f"/{action}?key={key}")), headers_of(web, action, key)
    shop.charge.idempotency_forget(42, 13)
    shop.receive(shop.charge, 42, 13)

    response = web.post(f"/{action}", data=form)
    assert (response.status_code, "it has changed" in response.text) == (409, True)
    response = change(web, action, key, **headers)
    assert (response.status_code, "has changed" in response.json()["error"]) == (412, True)
    assert shop.charge.idempotency_record(42, 13) is not None
    assert shop.published() == []


@each_action
def test_the_api_requires_a_token_and_the_etag(
    shop: Shop, web: httpx.Client, key: str, action: str
) -> None:
    *_, status, case = ACTIONS[action]
    headers = headers_of(web, action, key)
    token = {"x-csrf-token": headers["x-csrf-token"]}
    other = headers_of(web, "rerun" if action == "forget" else "forget", key)["if-match"]

    assert change(web, action, key).status_code == 403
    assert change(web, action, key, **{"if-match": headers["if-match"]}).status_code == 403
    assert change(web, action, key, **token).status_code == 428
    for etag in ('"F-1"', other):
        assert change(web, action, key, **token, **{"if-match": etag}).status_code == 412
    assert shop.published() == []
    response = change(web, action, key, **headers)

    assert (response.status_code, response.json()["case"]) == (status, case)
    assert (shop.charge.idempotency_record(42, 13) is None) == (action == "forget")
    assert [message["headers"]["task"] for message in shop.published()] == (
        ["shop.charge"] * (action == "rerun")
    )
