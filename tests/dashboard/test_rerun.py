"""Running a call again in the dashboard: question, rights, tokens, arguments, message."""

from __future__ import annotations

import html
import json
import os
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from cryptography.fernet import Fernet

from celery_idempotent import signals
from celery_idempotent.dashboard import Access
from celery_idempotent.errors import CorruptRecordError, IdempotencyError, StoreUnavailableError
from celery_idempotent.operations.calls import changes
from tests.dashboard.conftest import Open, fields_of
from tests.monitoring.conftest import Shop, received


@pytest.fixture(autouse=True)
def with_messages(shop: Shop) -> None:
    """Publishes messages, instead of running the tasks."""
    shop.app.conf.task_always_eager = False


def message_of(shop: Shop, key: str) -> bytes:
    """Returns the name of the message that is kept for a key."""
    (name,) = shop.client.keys(f"idem:{{idem:{key}}}:message:*")
    return name


def test_a_failed_call_is_run_again_after_a_question(shop: Shop, open_dashboard: Open) -> None:
    key = shop.receive(shop.charge, 42, 13)
    web = open_dashboard(authorize=lambda _: Access("ann", forget=True, results=True))

    assert f"/rerun?key={key.replace(':', '%3A')}" in web.get(f"/records/{key}").text
    question = web.get("/rerun", params={"key": key})
    assert "Run this call again?" in question.text
    assert '<span class="value-number">42</span>' in question.text or ">42<" in question.text
    assert shop.published() == []
    with received(signals.rerun) as sent:
        response = web.post("/rerun", data=fields_of(question))

    assert (response.status_code, "Published" in response.text) == (200, True)
    (message,) = shop.published()
    assert message["headers"]["task"] == "shop.charge"
    assert message["properties"]["priority"] == 3
    fingerprint = shop.charge.idempotency_key_of(42, 13).fingerprint.hex()
    assert fingerprint in message["headers"]["idempotency"]
    assert shop.charge.idempotency_record(42, 13).state == "FAILED"
    (details,) = sent
    assert (details["user"], details["key"], details["sender"]) == ("ann", key, shop.charge)


def test_arguments_are_shown_to_those_who_may_see_results(shop: Shop, open_dashboard: Open) -> None:
    key = shop.receive(shop.charge, 4711, 13)
    web = open_dashboard(authorize=lambda _: Access("bob", forget=True))

    page = web.get("/rerun", params={"key": key}).text

    assert "You may not see arguments." in page
    assert "4711" not in page


def test_a_completed_call_needs_a_right_of_its_own(shop: Shop, open_dashboard: Open) -> None:
    shop.app.conf.result_extended = True
    key = shop.receive(shop.charge, 42, 999)
    secret = {"secret_key": "shared"}
    web = open_dashboard(authorize=lambda _: Access("local", forget=True, results=True), **secret)
    may = open_dashboard(**secret)
    form = {**fields_of(may.get("/rerun", params={"key": key})), "repeat": "yes"}

    assert "Run again" not in web.get(f"/records/{key}").text
    assert web.get("/rerun", params={"key": key}).status_code == 403
    assert web.post("/rerun", data=form).status_code == 403
    assert shop.published() == []
    assert may.post("/rerun", data=form).status_code == 200


def test_a_completed_call_is_asked_about_twice(shop: Shop, web: httpx.Client) -> None:
    shop.app.conf.result_extended = True
    key = shop.receive(shop.charge, 42, 999)
    question = web.get("/rerun", params={"key": key})
    form = fields_of(question)

    assert "with arguments from the result backend" in question.text
    assert web.post("/rerun", data=form).status_code == 400
    assert shop.published() == []
    assert web.post("/rerun", data={**form, "repeat": "yes"}).status_code == 200
    (message,) = shop.published()
    assert message["headers"]["id"] != shop.charge.idempotency_record(42, 999).task_id
    fingerprint = shop.charge.idempotency_key_of(42, 999).fingerprint.hex()
    assert fingerprint in message["headers"]["idempotency"]


def test_without_a_message_it_says_so(shop: Shop, web: httpx.Client) -> None:
    shop.charge.apply((42, 13))
    key = shop.charge.idempotency_key_of(42, 13)

    response = web.get(f"/rerun?key={key}")

    assert (response.status_code, "its message is not kept" in response.text) == (409, True)
    assert web.get("/rerun", params={"key": "shop.charge:" + "x" * 22}).status_code == 404


@pytest.mark.parametrize(
    ("error", "status"),
    [(StoreUnavailableError("Redis is away"), 503), (CorruptRecordError("It is damaged"), 409)],
    ids=["unavailable", "damaged"],
)
def test_a_message_that_cannot_be_read_is_reported(
    shop: Shop, web: httpx.Client, error: IdempotencyError, status: int
) -> None:
    key = shop.receive(shop.charge, 42, 13)

    with patch.object(changes, "find_ended", side_effect=error):
        response = web.get("/rerun", params={"key": key})

    assert (response.status_code, str(error) in response.text) == (status, True)


#: What a client changes in a message, and why that is refused.
FORGED: list[tuple[Any, str]] = [
    ({"task": "shop.tidy", "args": []}, "belongs to another task"),
    ({"task_id": "another"}, "belongs to another task"),
    ({"options": {"queue": "root"}}, "queue 'root' is not one of the app's"),
    ({"options": {"exchange": "root"}}, "has an option 'exchange'"),
    ({"options": {"task_id": "x"}}, "has an option 'task_id'"),
    ({"options": {"priority": "x"}}, "has an option 'priority'"),
    ({"options": {"priority": 10**30}}, "'priority' is out of range"),
    ({"options": {"time_limit": float("nan")}}, "'time_limit' is out of range"),
    ({"options": {"link": [5]}}, "its continuation is malformed"),
    ({"options": {"link": [{"task": "x"}] * 10_000}}, "more than 10,000 signatures"),
    ({"options": {"headers": {"CC": ["root"]}}}, "the header 'CC'"),
    ({"options": {"headers": {"id": "x"}}}, "the header 'id'"),
    ({"options": {"headers": {"task": "x"}}}, "the header 'task'"),
    ({"options": {"headers": {"idempotency_key": "x"}}}, "has another key"),
    ({"options": {"headers": {"idempotency_key": False}}}, "has another key"),
    ({"options": None}, "have another type"),
    ({"kwargs": []}, "have another type"),
    ([1, 2], "TypeError"),
    ({"task_id": ["x"]}, "belongs to another task"),
]


class TestForgedMessages:
    """A client that can write to Redis can write what a rerun publishes, unless it is encrypted."""

    def forge(self, shop: Shop, key: str, change: Any) -> None:
        """Changes the message that is kept for a key, or replaces it by a list."""
        name = message_of(shop, key)
        form, _, body = shop.client.get(name).partition(b"\n")
        forged = {**json.loads(body), **change} if isinstance(change, dict) else change
        shop.client.set(name, form + b"\n" + json.dumps(forged).encode(), px=60_000)

    def test_publish_nothing_but_the_call_itself(self, shop: Shop, web: httpx.Client) -> None:
        for change, reason in FORGED:
            shop.charge.idempotency_forget(42, 13)
            key = shop.receive(shop.charge, 42, 13)
            form = fields_of(web.get("/rerun", params={"key": key}))
            self.forge(shop, key, change)

            responses = [web.get("/rerun", params={"key": key}), web.post("/rerun", data=form)]
            output = shop.celery("rerun", key, "--yes", code=1)

            assert [response.status_code for response in responses] == [409, 409], change
            for text in (output, *(html.unescape(response.text) for response in responses)):
                assert reason in text
            assert shop.published() == []
            assert shop.client.keys("root*") == []

    def test_a_message_that_was_replaced_meanwhile(self, shop: Shop, web: httpx.Client) -> None:
        key = shop.receive(shop.charge, 42, 13)
        form = fields_of(web.get("/rerun", params={"key": key}))
        self.forge(shop, key, {"args": [42, 1_000_000]})

        response = web.post("/rerun", data=form)

        assert (response.status_code, "it has changed" in response.text) == (409, True)
        assert shop.published() == []

    def test_all_that_is_published_is_shown(
        self, shop: Shop, web: httpx.Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "celery_idempotent.audit")
        link = {"task": "evil", "args": [], "options": {"queue": "root", "link": [{"task": "sly"}]}}
        group = {"task": "celery.group", "kwargs": {"tasks": [{"task": "also", "args": [4711]}]}}
        key = shop.receive(shop.charge, 42, 13)
        options = {"link": [link], "chain": [group], "link_error": [{"task": "on.error"}]}
        self.forge(shop, key, {"options": options})

        page = html.unescape(web.get("/rerun", params={"key": key}).text)
        question = shop.celery("rerun", key, answer="n\n", code=1)
        shop.celery("rerun", key, "--yes")

        (line,) = [line for line in caplog.messages if "is run again by" in line]
        for part in ("then evil in queue root", "then sly", "then also", "after an error on.error"):
            assert part in page
            assert part in question
            assert part in line
        assert "4711" in page
        (message,) = shop.published()
        assert message["headers"]["task"] == "shop.charge"

    def test_arguments_that_do_not_fit_are_refused(self, shop: Shop) -> None:
        key = shop.receive(shop.charge, 42, 13)
        self.forge(shop, key, {"kwargs": {"x\n": 1}})

        output = shop.celery("rerun", key, "--yes", code=1)

        assert "cannot be published: TypeError" in output
        assert output.count("\n") == 1
        assert shop.published() == []


class TestEncryptedMessages:
    @pytest.fixture(autouse=True)
    def encrypted(self, shop: Shop) -> None:
        shop.app.conf.idempotency_encryption_keys = [Fernet.generate_key().decode()]

    def test_a_plain_one_is_refused(self, shop: Shop, web: httpx.Client) -> None:
        key = shop.receive(shop.charge, 42, 13)
        message = {"task": "shop.charge", "task_id": "x", "args": [], "kwargs": {}, "options": {}}
        shop.client.set(message_of(shop, key), b"json\n" + json.dumps(message).encode())

        response = web.get("/rerun", params={"key": key})

        assert (response.status_code, "is not encrypted" in response.text) == (409, True)

    def test_one_of_another_task_id_is_refused(self, shop: Shop, web: httpx.Client) -> None:
        key = shop.receive(shop.charge, 42, 13)
        older = shop.client.get(message_of(shop, key))
        shop.charge.idempotency_forget(42, 13)
        shop.receive(shop.charge, 42, 13, task_id="the newer")
        assert web.get("/rerun", params={"key": key}).status_code == 200
        shop.client.set(message_of(shop, key), older)

        response = web.get("/rerun", params={"key": key})

        assert (response.status_code, "cannot be decrypted" in response.text) == (409, True)


@pytest.mark.parametrize("queue", [["celery"], {"celery": 1}, "unknown"])
def test_a_queue_of_the_backend_is_checked(shop: Shop, web: httpx.Client, queue: Any) -> None:
    shop.app.conf.result_extended = True
    key = shop.receive(shop.charge, 42, 999)
    name = f"celery-task-meta-{shop.charge.idempotency_record(42, 999).task_id}"
    shop.client.set(name, json.dumps({**json.loads(shop.client.get(name)), "queue": queue}))

    page = web.get("/rerun", params={"key": key}).text

    assert '<h2 id="part-1">shop.charge</h2>' in page


class RunsCode:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("where", ["message", "record", "result backend"])
def test_nothing_is_unpickled(shop: Shop, web: httpx.Client, tmp_path: Path, where: str) -> None:
    """Not even where the app accepts pickle."""
    shop.app.conf.update(accept_content=["json", "pickle"], result_extended=True)
    task, pickled = shop.charge, pickle.dumps(RunsCode(tmp_path / "pickled"))
    key = shop.receive(task, 42, 13 if where == "message" else 999)
    (name,) = shop.client.keys(f"idem:{{idem:{key}}}:message:*") or [f"idem:{key}"]
    if where == "message":
        shop.client.set(name, b"pickle\n" + pickled)
    elif where == "record":
        head = shop.client.get(name).partition(b"\x04json")[0]
        shop.client.set(name, head + b"\x06pickle" + pickled)
    else:
        shop.app.conf.result_serializer = "pickle"
        task.app.backend.content_type = "application/x-python-serialize"
        shop.client.set(f"celery-task-meta-{task.idempotency_record(42, 999).task_id}", pickled)

    for path in (f"/records/{key}", f"/api/records/{key}", f"/rerun?key={key}", "/", "/records"):
        assert web.get(path).status_code < 500
    for command in (["show", key], ["list"], ["stats"], ["explain", "shop.charge", "[42, 999]"]):
        shop.celery(*command)
    shop.celery("rerun", key, "--yes", "--completed", code=int(where != "record"))
    assert not (tmp_path / "pickled").exists()
