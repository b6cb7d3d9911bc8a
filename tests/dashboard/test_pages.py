"""The pages and the JSON API, with records of every state."""

from __future__ import annotations

import html
import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from sqlalchemy import create_engine

from celery_idempotent.contrib.sqlalchemy import metadata
from celery_idempotent.dashboard.sampler import Sampler
from celery_idempotent.operations.worker import inspect_commands
from tests.dashboard.conftest import Open, names_of_threads
from tests.monitoring.conftest import Shop, copy
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually


def text_of(response: httpx.Response) -> str:
    """Returns the text of a page, on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", response.text)).split())


@pytest.mark.exhaustive
def test_the_overview_shows_what_runs_and_counts_records(shop: Shop, web: httpx.Client) -> None:
    shop.charge.apply((1, 999))
    shop.begin(shop.charge, 2, 999)
    shop.begin(shop.pack, 3, lease_ms=0, attempt=2)

    def overview() -> str:
        text = text_of(web.get("/"))
        return text if "1 lease expired" in text and "3 records" in text else ""

    page = eventually(overview, "the overview has all records")
    for text in ("1 running", "LEASE EXPIRED shop.pack", "STARTED shop.charge", "2 takeover"):
        assert text in page
    stats = web.get("/api/stats").json()
    assert stats["tasks"]["shop.charge"]["states"] == {"COMPLETED": 1, "STARTED": 1}


def test_records_are_filtered_and_paged(shop: Shop, web: httpx.Client) -> None:
    for number in range(3):
        shop.charge.apply((number, 999))
    shop.charge.apply((3, 13))
    shop.begin(shop.pack, 1)

    assert len(web.get("/api/records").json()["records"]) == 5
    failed = web.get("/api/records?state=failed").json()["records"]
    assert [record["state"] for record in failed] == ["FAILED"]
    assert len(web.get("/api/records?task=shop.charge").json()["records"]) == 4
    assert web.get("/api/records?older_than=1h").json() == {"records": [], "cursor": None}
    assert text_of(web.get("/records?state=FAILED")).count("FAILED shop.charge") == 1
    assert "No matching records" in text_of(web.get("/records?older_than=1h"))


def test_many_names_share_a_row(shop: Shop, web: httpx.Client) -> None:
    copy(shop, 300, "forged.{}:" + "x" * 22)
    copy(shop, 1, "long" * 300 + ":" + "x" * 22)

    def counted() -> str:
        page = web.get("/").text
        return page if "301" in page and "200" in page else ""

    page = eventually(counted, "all records are counted")
    assert page.count('class="task"') == 102
    assert "(other names)" in text_of(web.get("/"))
    tasks = web.get("/api/stats").json()["tasks"]
    documents = shop.json("stats", "--timeout", "0")["tasks"]
    assert len(tasks) == len(documents) == 102
    for name, number in (("(other names)", 200), ("shop.charge", 1)):
        assert tasks[name]["states"] == {"COMPLETED": number}
        assert documents[name]["records"] == number
    found = web.get("/api/records?task=FORGED.29&limit=500").json()["records"]
    assert len(found) == 11


def test_lone_surrogates_are_escaped(shop: Shop, web: httpx.Client) -> None:
    def half(text: str) -> str:
        return text

    task = shop.add_task(half, "shop.half", label="half {text}")
    task.apply(("half \ud800",))
    key = task.idempotency_key_of("half \ud800")
    path = f"/records/{key}"

    assert "half \\ud800" in web.get(path).text
    assert web.get(f"/api{path}").json()["result"] == "half \ud800"
    explained = web.post("/explain", data={"task": task.name, "args": '["half \\ud800"]'})
    assert "replays the result" in explained.text
    for label, number in (("HALF", 1), ("quarter", 0)):
        assert len(web.get(f"/api/records?label={label}").json()["records"]) == number
        assert ("half \\ud800" in web.get(f"/records?label={label}").text) == bool(number)
    assert web.post("/api/explain", content=b'{"task": "\\ud800"}').status_code == 400


def test_a_page_leads_to_the_next_one(shop: Shop, web: httpx.Client) -> None:
    copy(shop, 300)

    keys, path = set(), "/records?task=shop.charge"
    for _ in range(50):
        page = web.get(path).text
        keys |= set(re.findall(r'href="/records/(shop\.charge%3A[^"]+)"', page))
        following = re.search(r'rel="next" href="([^"]+)"', page)
        if following is None:
            break
        path = html.unescape(following[1])

    assert len(keys) == 301


def test_an_invalid_parameter_is_refused(web: httpx.Client) -> None:
    for path, message in (
        ("records?state=GONE", "'GONE' is not one of RESERVED"),
        ("records?older_than=soon", "is not a duration"),
        ("records?cursor=x", "is not a cursor"),
    ):
        for prefix in ("/", "/api/"):
            response = web.get(f"{prefix}{path}")
            assert (response.status_code, message in html.unescape(response.text)) == (400, True)
    assert web.get("/api/records?limit=9999").status_code == 400


class TestRecord:
    def test_shows_a_result_as_a_tree(self, shop: Shop, web: httpx.Client) -> None:
        shop.charge.apply((42, 999), task_id="the-task-id")
        key = shop.charge.idempotency_key_of(42, 999)

        page = text_of(web.get(f"/records/{key}"))

        assert "object of 2 order 42 amount 999" in page
        for text in ("the-task-id", "Execution began", "Result stored"):
            assert text in page
        document = web.get(f"/api/records/{key}").json()
        assert document["state"] == "COMPLETED"
        assert document["result"] == {"order": 42, "amount": 999}

    def test_shows_an_error_and_cuts_a_large_value(self, shop: Shop, web: httpx.Client) -> None:
        shop.charge.apply((42, 13))
        shop.pack.apply((1, 9_000))

        page = text_of(web.get(f"/records/{shop.charge.idempotency_key_of(42, 13)}"))
        assert "DeclinedError : order 42" in page
        large = web.get(f"/records/{shop.pack.idempotency_key_of(1, 9_000)}").text
        assert "(9,000 characters)" in large
        assert "x" * 2_001 not in large

    def test_shows_a_takeover_and_the_lease(self, shop: Shop, web: httpx.Client) -> None:
        key = shop.begin(shop.charge, 42, 999, attempt=3)

        response = web.get(f"/records/{key}")

        page = text_of(response)
        assert "2 earlier executions died" in page
        assert "Taken over by another execution" in page
        assert "Running; the lease ends" in page
        assert "data-deadline=" in response.text
        expired = shop.begin(shop.charge, 43, 999, lease_ms=0)
        assert "LEASE EXPIRED" in text_of(web.get(f"/records/{expired}"))

    def test_an_absent_one_is_explained(self, shop: Shop, web: httpx.Client) -> None:
        path = f"/records/{shop.charge.idempotency_key_of(42, 999)}"

        assert "a call with it would run" in text_of(web.get(path))
        assert web.get(path).status_code == 404
        assert "error" in web.get(f"/api{path}").json()


class TestSearch:
    def test_leads_to_the_record(self, shop: Shop, web: httpx.Client) -> None:
        shop.charge.apply((42, 999), task_id="the-task-id")
        key = str(shop.charge.idempotency_key_of(42, 999))

        for name in (key, f"idem:{key}", f" {key} ", "the-task-id"):
            response = web.get("/search", params={"q": name})
            assert response.status_code == 303
            assert response.headers["location"] == f"/records/{key.replace(':', '%3A')}"
        assert web.get(response.headers["location"]).status_code == 200

    def test_of_a_duplicate_leads_to_the_record_it_met(self, shop: Shop, web: httpx.Client) -> None:
        shop.charge.apply((42, 999), task_id="the-first")
        shop.charge.apply((42, 999), task_id="the-duplicate")

        key = str(shop.charge.idempotency_key_of(42, 999)).replace(":", "%3A")
        eventually(lambda: shop.store.reference("the-duplicate"), "its reference is stored")
        found = web.get("/search?q=the-duplicate").headers["location"]
        assert found == f"/records/{key}?task_id=the-duplicate"
        became = "got the outcome of task the-first (attempt 1)"
        assert f"Task the-duplicate {became}." in web.get(found).text
        assert web.get(f"/api{found}").json()["duplicate"]["end"] == "replayed"
        assert became not in web.get(found.replace("the-duplicate", "the-first")).text

    def test_of_something_unknown_says_so(self, web: httpx.Client) -> None:
        found = web.get("/search?q=unknown", follow_redirects=True)
        assert found.url.path == "/records"
        assert "No matching records" in found.text
        assert web.get("/search?q=").status_code == 400


class TestExplain:
    def test_shows_key_and_prediction(self, shop: Shop, web: httpx.Client) -> None:
        shop.charge.apply((42, 999))
        key = shop.charge.idempotency_key_of(42, 999)
        form = {"task": "shop.charge", "args": "[42]", "kwargs": '{"amount": 999}'}

        page = text_of(web.post("/explain", data=form))

        assert f"Key {key}" in page
        assert "replay The call replays the result" in page
        call = {"task": "shop.charge", "args": [42], "kwargs": {"amount": 1}}
        document = web.post("/api/explain", json=call).json()
        assert (document["key"], document["prediction"]["case"]) == (str(key), "reused")

    def test_takes_a_key_of_the_call_and_a_task_id(self, shop: Shop, web: httpx.Client) -> None:
        own = {"task": "shop.charge", "args": [42, 999], "key": ["acme", "r-1"]}
        assert "~" in web.post("/api/explain", json=own).json()["key"]
        tidy = {"task": "shop.tidy", "task_id": "x"}
        assert web.post("/api/explain", json=tidy).json()["prediction"]["case"] == "run"
        for body in (b"", b"[]", b'"x"', b"\xff"):
            assert web.post("/api/explain", content=body).status_code == 400

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            ({"task": "shop.absent"}, "is not an idempotent task"),
            ({"task": "shop.charge", "args": "[1"}, "is not JSON"),
            ({"task": "shop.charge", "args": "{}"}, "not a JSON list and a JSON object"),
            ({"task": "shop.charge", "args": "[]"}, "do not fit shop.charge"),
            ({"task": "shop.tidy"}, "give the task's id"),
            ({"task": "shop.charge", "args": "[1, 2]", "key": "x" * 999}, "No key can be derived"),
        ],
    )
    def test_says_what_is_wrong(self, web: httpx.Client, call: Any, message: str) -> None:
        page = web.post("/explain", data=call)

        assert message in text_of(page)
        assert html.escape(call.get("args", "")) in page.text, "the form keeps what was given"


def test_outcomes_in_a_database_are_shown(shop: Shop, open_dashboard: Open, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/outcomes")
    metadata.create_all(engine)

    def book(order: int) -> int:
        return order

    task = shop.add_task(book, "shop.book", transaction=engine)
    task.apply((42,))
    key = task.idempotency_key_of(42)
    web = open_dashboard()

    assert "Outcome in the database Database" in text_of(web.get(f"/records/{key}"))
    shop.client.delete(f"idem:{key}")
    page = text_of(web.get(f"/records/{key}"))
    assert "the database has its outcome" in page
    assert "COMPLETED" in page
    web.get("/doctor")
    assert "Outcomes in databases Database Rows Expired" in text_of(web.get("/"))
    engine.dispose()


def test_doctor_shows_the_findings(shop: Shop, web: httpx.Client) -> None:
    page = text_of(web.get("/doctor"))
    findings = web.get("/api/doctor").json()["findings"]

    assert {finding["name"] for finding in findings} >= {"persistence"}
    assert all(finding["what"] in page for finding in findings)


def test_without_workers_the_pages_say_so(web: httpx.Client) -> None:
    assert "No worker replied" in text_of(web.get("/workers"))
    assert web.get("/api/workers").json() == {}
    assert web.get("/api/stats").json()["workers_answered"] is False


def test_the_first_page_does_not_wait_for_the_workers(shop: Shop, open_dashboard: Open) -> None:
    shop.begin(shop.charge, 1, 999)
    ask, may_ask = inspect_commands.ask, threading.Event()

    with patch.object(inspect_commands, "ask", lambda *args: may_ask.wait(SOON) and ask(*args)):
        web = open_dashboard()
        page = text_of(web.get("/"))
        may_ask.set()

    for text in ("1 running", "… workers", "Nothing is known yet"):
        assert text in page
    assert "No worker replied" in text_of(web.get("/workers"))
    assert "0 workers" in text_of(web.get("/"))


def test_a_record_shows_where_its_body_is(shop: Shop, open_dashboard: Open) -> None:
    shop.begin(shop.charge, 1, 999)
    record, stack = shop.charge.idempotency_record(1, 999), ["/shop.py:1 charge", "<b>:2 post"]
    call = {"task": "shop.charge", "key": record.key, "token": record.token}
    worker = inspect_commands.Worker([{**call, "heartbeat": "healthy", "stack": stack}], {}, {})
    replies = inspect_commands.Replies({"one@here": worker})

    with patch.object(inspect_commands, "ask", return_value=replies):
        web = open_dashboard()
        web.get("/api/workers")  # asks the workers
        page = web.get(f"/records/{record.key}")
        assert web.get(f"/api/records/{record.key}").json()["stack"] == stack

    assert "Body /shop.py:1 charge <b>:2 post" in text_of(page)
    assert "<b>" not in page.text


@pytest.mark.exhaustive
def test_a_closed_sampler_still_answers(shop: Shop) -> None:
    eventually(lambda: "dashboard" not in names_of_threads(), "other samplers have ended")
    sampler = Sampler(shop.app, "")
    sampler.close()
    sampler.start()
    sampler.join()

    sampler.findings()

    assert "dashboard" not in names_of_threads()


def test_an_unreachable_redis_is_reported(shop: Shop, open_dashboard: Open) -> None:
    with RedisServer.start() as stopped:
        shop.app.conf.idempotency_redis_url = stopped.url.replace("://", "://:secret@")
    web = open_dashboard()

    for path, status in (("/", 200), ("/records", 503), ("/doctor", 200), ("/api/records", 503)):
        response = web.get(path)
        assert response.status_code == status, path
        assert "secret" not in response.text
    assert "cannot be reached" in web.get("/records").text
    alert = re.compile('role="alert">[^<]*cannot be reached')
    eventually(lambda: alert.search(web.get("/").text), "the overview shows the error")


@pytest.mark.exhaustive
def test_what_is_not_known_while_redis_is_away_is_a_dash(
    shop: Shop, server: RedisServer, web: httpx.Client
) -> None:
    def eventually_shows(text: str, path: str) -> None:
        eventually(lambda: text in text_of(web.get(path)), f"{path} shows {text}")

    shop.begin(shop.charge, 1, 999)
    eventually_shows("1 running", "/")
    server.kill()
    try:
        # The broker, which is this Redis as well, may be missed first.
        eventually_shows("– running", "/")
        page = text_of(web.get("/"))
        assert re.search(r"Last read \d+ s ago", page)
        assert "Not known" in page
        eventually_shows("cannot be reached", "/workers")
    finally:
        server.restart()
    eventually_shows("0 running", "/")


def test_the_overview_sorts_its_tasks_and_has_ranges(shop: Shop, web: httpx.Client) -> None:
    shop.charge.apply((1, 999))
    for number in range(2):
        shop.pack.apply((number,))

    def order(query: str) -> list[str]:
        rows = re.findall(r'class="task"><a [^>]+>([^<]+)', web.get(f"/{query}").text)
        return rows if len(rows) == 2 else []

    assert eventually(lambda: order(""), "both are counted") == ["shop.charge", "shop.pack"]
    assert order("?sort=Completed") == ["shop.pack", "shop.charge"]
    assert "A bar is 1 h 24 min" in text_of(web.get("/?range=7d"))
    assert web.get("/?range=2d").status_code == 400
