"""What is special to one framework or server."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from werkzeug.serving import make_server

from celery_idempotent import Idempotency
from celery_idempotent.testing.server import RedisServer
from tests.http.drivers.web_server import (
    GTHREAD,
    GUNICORN,
    UVICORN,
    WebServer,
    post,
    request_count,
    serving,
)
from tests.waiting import eventually

SERVERS = {
    "uvicorn": UVICORN,
    "gunicorn-uvicorn": (*GUNICORN, "uvicorn.workers.UvicornWorker"),
}


@pytest.fixture(scope="module", params=SERVERS)
def web(request: pytest.FixtureRequest, site_environment: dict[str, str]) -> Iterator[WebServer]:
    server = SERVERS[request.param]
    with serving("tests.http.sites.fastapi_site:app", server, **site_environment) as web:
        yield web


def test_the_openapi_document_has_the_header(web: WebServer) -> None:
    operation = web.client.get("/openapi.json").json()["paths"]["/payments"]["post"]
    (parameter,) = (p for p in operation["parameters"] if p["in"] == "header")

    assert parameter["name"] == "idempotency-key"
    assert parameter["required"] is False
    assert parameter["description"] == "Makes retries safe."


def test_a_background_task_runs_once(web: WebServer, client: redis.Redis, key: str) -> None:
    responses = [web.post("/payments", key, {"order": key}) for _ in range(2)]

    assert responses[1].headers["idempotency-replayed"] == "true"
    eventually(lambda: request_count(client, f"{key}:after"), "the background task has run")
    assert request_count(client, f"{key}:after") == 1


def test_a_client_that_closes_a_stream_cancels_the_awaited_function(
    web: WebServer, server: RedisServer, client: redis.Redis, key: str
) -> None:
    """Starlette cancels the function at every turn of the event loop until it ends."""
    records = Idempotency(server.url, key_prefix="web")

    def record() -> Any:
        return next(records.records(task="web.endless"), None)

    def connections() -> int:
        info: Any = client.info("stats")
        return int(info["total_connections_received"])

    def cpu_ticks() -> int:
        return sum(map(int, Path(f"/proc/{web.pid}/stat").read_text().split()[13:15]))

    with web.client.stream("GET", f"/endless/{key}") as response:
        lines = response.iter_lines()  # the end of the block closes the connection
        assert next(lines) == "started"
        eventually(lambda: request_count(client, key), "the function runs")
        assert record() is not None
        before, ticks = connections(), cpu_ticks()
    eventually(lambda: record() is None, "the key is released")
    for _ in range(10):  # the server is responsive, and idle
        assert web.client.get("/docs").status_code == 200
        time.sleep(0.1)
    assert connections() - before <= 4
    assert cpu_ticks() - ticks < 50  # at 100 ticks a second
    records.close()


def pay_three_times(
    app: str, environment: dict[str, str], key: str
) -> tuple[list[httpx.Response], str]:
    """Logs in and sends one payment three times; each execution changes Flask's session cookie."""
    site = f"tests.http.sites.flask_site:{app}"
    with serving(site, GTHREAD, **environment) as web:
        browser = httpx.Client(base_url=web.url, timeout=60)
        assert browser.post("/login/alice").text == "alice"
        responses = [post(browser, "/payments", key, {"order": key}) for _ in range(3)]
        browser.close()
        return responses, web.log()


def test_a_flask_session_cookie_is_refused_as_an_identity(
    site_environment: dict[str, str], client: redis.Redis, key: str
) -> None:
    responses, log = pay_three_times("by_session_cookie", site_environment, key)

    assert [response.status_code for response in responses] == [400] * 3
    assert b"identity-missing" in responses[0].content
    assert "the cookie session is a signed session" in log
    assert request_count(client, key) == 0


def test_the_user_of_a_flask_session_is_an_identity(
    site_environment: dict[str, str], client: redis.Redis, key: str
) -> None:
    responses, _ = pay_three_times("by_session_user", site_environment, key)

    assert [response.json() for response in responses] == [{"payment": 1}] * 3
    assert request_count(client, key) == 1


def test_a_method_in_lower_case_needs_a_key_too(
    site_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, client: redis.Redis, key: str
) -> None:
    """Werkzeug's server passes the method as it came; Flask routes it as POST."""
    for name, value in site_environment.items():
        monkeypatch.setenv(name, value)
    from tests.http.sites.flask_site import app

    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    headers = {"Authorization": "Bearer alice", "Content-Type": "application/json"}
    connection.request("post", "/required/payments", b'{"order": "%s"}' % key.encode(), headers)
    response = connection.getresponse()
    assert (response.status, b"key-missing" in response.read()) == (400, True)
    connection.close()
    server.shutdown()
    thread.join()
    server.server_close()
    assert request_count(client, key) == 0
