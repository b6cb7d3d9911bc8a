"""Running a call again in the dashboard: question, rights, tokens, arguments, message."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from celery.app.trace import build_tracer

from celery_idempotent import signals
from celery_idempotent.dashboard import Access
from celery_idempotent.errors import CorruptRecordError, IdempotencyError, StoreUnavailableError
from celery_idempotent.monitoring import changes
from tests.dashboard.conftest import fields_of
from tests.monitoring.conftest import Shop

Open = Callable[..., httpx.Client]


@pytest.fixture(autouse=True)
def with_messages(shop: Shop) -> None:
    """Publishes messages, instead of running the tasks."""
    shop.app.conf.task_always_eager = False


def receive(shop: Shop, task: Any, *args: Any) -> str:
    """Runs a message of `task` as a pool child does; returns the key."""
    task_id = task.idempotency_key_of(*args).digest
    request = {
        "id": task_id,
        "task": task.name,
        "args": args,
        "kwargs": {},
        "hostname": "here",
        "delivery_info": {"exchange": "", "routing_key": "celery", "priority": 3},
        "properties": {"content_type": "application/json"},
    }
    tracer = build_tracer(task.name, task, shop.app.loader, "here", app=shop.app)
    tracer(task_id, args, {}, request)
    return str(task.idempotency_key_of(*args))


def published(shop: Shop) -> list[dict[str, Any]]:
    """Returns the messages in the broker."""
    queues = [b"celery", *shop.client.keys("celery\x06*")]
    texts = {text for queue in queues for text in shop.client.lrange(queue, 0, -1)}
    return [json.loads(text) for text in texts]


def test_a_failed_call_is_run_again_after_a_question(shop: Shop, open_dashboard: Open) -> None:
    received: list[dict[str, Any]] = []

    def record(**details: Any) -> None:
        received.append(details)

    signals.rerun.connect(record)
    key = receive(shop, shop.charge, 42, 13)
    web = open_dashboard(authorize=lambda _: Access("ann", forget=True, results=True))

    assert f"/rerun?key={key.replace(':', '%3A')}" in web.get(f"/records/{key}").text
    question = web.get("/rerun", params={"key": key})
    assert "Run this call again?" in question.text
    assert '<span class="value-number">42</span>' in question.text or ">42<" in question.text
    assert published(shop) == []
    response = web.post("/rerun", data=fields_of(question))

    assert (response.status_code, "Published" in response.text) == (200, True)
    (message,) = published(shop)
    assert message["headers"]["task"] == "shop.charge"
    assert message["properties"]["priority"] == 3
    assert (
        shop.charge.idempotency_key_of(42, 13).fingerprint.hex()
        in (message["headers"]["idempotency"])
    )
    assert shop.charge.idempotency_record(42, 13).state == "FAILED"
    (details,) = received
    assert (details["user"], details["key"], details["sender"]) == ("ann", key, shop.charge)


def test_arguments_are_shown_to_those_who_may_see_results(shop: Shop, open_dashboard: Open) -> None:
    key = receive(shop, shop.charge, 4711, 13)
    web = open_dashboard(authorize=lambda _: Access("bob", forget=True))

    page = web.get("/rerun", params={"key": key}).text

    assert "You may not see arguments." in page
    assert "4711" not in page


@pytest.mark.parametrize("options", [{"read_only": True}, {}], ids=["read-only", "viewer"])
def test_it_needs_the_right_to(shop: Shop, open_dashboard: Open, options: Any) -> None:
    key = receive(shop, shop.charge, 42, 13)
    form = fields_of(open_dashboard().get("/rerun", params={"key": key}))
    web = open_dashboard(
        authorize=lambda _: Access("local", forget=bool(options), results=True), **options
    )

    assert "Run again" not in web.get(f"/records/{key}").text
    assert web.get("/rerun", params={"key": key}).status_code == 403
    assert web.post("/rerun", data=form).status_code == 403
    assert published(shop) == []


def test_a_form_of_another_site_is_refused(shop: Shop, web: httpx.Client) -> None:
    receive(shop, shop.charge, 42, 13)

    assert web.post("/rerun", data={"token": "forged"}).status_code == 403
    assert published(shop) == []


def test_a_record_that_has_changed_since_is_kept(shop: Shop, web: httpx.Client) -> None:
    key = receive(shop, shop.charge, 42, 13)
    form = fields_of(web.get("/rerun", params={"key": key}))
    shop.charge.idempotency_forget(42, 13)
    receive(shop, shop.charge, 42, 13)

    response = web.post("/rerun", data=form)

    assert (response.status_code, "it has changed" in response.text) == (409, True)
    assert published(shop) == []


def test_a_completed_call_is_asked_about_twice(shop: Shop, web: httpx.Client) -> None:
    shop.app.conf.result_extended = True
    key = receive(shop, shop.charge, 42, 999)
    form = fields_of(web.get("/rerun", params={"key": key}))

    assert web.post("/rerun", data=form).status_code == 400
    assert published(shop) == []
    assert web.post("/rerun", data={**form, "repeat": "yes"}).status_code == 200
    (message,) = published(shop)
    assert message["headers"]["id"] != shop.charge.idempotency_record(42, 999).task_id
    assert (
        shop.charge.idempotency_key_of(42, 999).fingerprint.hex()
        in (message["headers"]["idempotency"])
    )


def test_without_a_message_it_says_so(shop: Shop, web: httpx.Client) -> None:
    shop.charge.apply((42, 13))

    response = web.get("/rerun", params={"key": str(shop.charge.idempotency_key_of(42, 13))})

    assert (response.status_code, "its message is not kept" in response.text) == (409, True)
    assert web.get("/rerun", params={"key": "shop.charge:" + "x" * 22}).status_code == 404


@pytest.mark.parametrize(
    ("error", "status"),
    [(StoreUnavailableError("Redis is away"), 503), (CorruptRecordError("It is damaged"), 409)],
    ids=["unavailable", "damaged"],
)
def test_a_message_that_cannot_be_read_is_reported(
    shop: Shop,
    web: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    error: IdempotencyError,
    status: int,
) -> None:
    key = receive(shop, shop.charge, 42, 13)

    def find(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(changes, "find_ended", find)

    response = web.get("/rerun", params={"key": key})
    assert (response.status_code, str(error) in response.text) == (status, True)


class TestJson:
    def test_a_failed_call_is_run_again(self, shop: Shop, web: httpx.Client) -> None:
        path = f"/api/records/{receive(shop, shop.charge, 42, 13)}"
        read = web.get(path).headers
        token, etag = {"x-csrf-token": read["x-csrf-token"]}, {"if-match": read["etag"]}

        assert web.post(f"{path}/rerun", headers=etag).status_code == 403
        assert web.post(f"{path}/rerun", headers=token).status_code == 428
        stale = web.post(f"{path}/rerun", headers={**token, "if-match": '"F-1"'})
        assert stale.status_code == 412
        assert published(shop) == []
        response = web.post(f"{path}/rerun", headers={**token, **etag})

        assert (response.status_code, response.json()["case"]) == (202, "published")
        (message,) = published(shop)
        assert message["headers"]["task"] == "shop.charge"

    def test_a_completed_call_needs_a_second_word(self, shop: Shop, web: httpx.Client) -> None:
        shop.app.conf.result_extended = True
        path = f"/api/records/{receive(shop, shop.charge, 42, 999)}"
        read = web.get(path).headers
        headers = {"x-csrf-token": read["x-csrf-token"], "if-match": read["etag"]}

        assert web.post(f"{path}/rerun", headers=headers).status_code == 400
        assert published(shop) == []
        assert web.post(f"{path}/rerun?repeat=true", headers=headers).status_code == 202
        assert len(published(shop)) == 1

    def test_it_needs_a_message_and_the_right_to(self, shop: Shop, open_dashboard: Open) -> None:
        shop.charge.apply((42, 999))
        path = f"/api/records/{shop.charge.idempotency_key_of(42, 999)}"
        web = open_dashboard()
        read = web.get(path).headers
        headers = {"x-csrf-token": read["x-csrf-token"], "if-match": read["etag"]}

        response = web.post(f"{path}/rerun?repeat=true", headers=headers)

        assert (response.status_code, response.json()["case"]) == (409, "no message")
        viewer = open_dashboard(authorize=lambda _: Access("local", forget=False))
        assert viewer.post(f"{path}/rerun", headers=headers).status_code == 403
