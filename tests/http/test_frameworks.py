"""What is special to one framework or server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from werkzeug.test import Client as Browser

from celery_idempotent import Idempotency
from tests.conftest import exhaustive_except
from tests.http.drivers.web_server import GUNICORN, UVICORN, WebServer, request_count, serving
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually

SERVERS = {"uvicorn": UVICORN, "gunicorn-uvicorn": (*GUNICORN, "uvicorn.workers.UvicornWorker")}


@pytest.fixture(scope="module", params=exhaustive_except(SERVERS, "uvicorn"))
def web(request: pytest.FixtureRequest, site_environment: dict[str, str]) -> Iterator[WebServer]:
    server = SERVERS[request.param]
    with serving("tests.http.sites.fastapi_site:app", server, **site_environment) as web:
        yield web


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


@pytest.mark.parametrize("name", ["by_session_cookie", "by_session_user"])
def test_the_user_of_a_flask_session_is_an_identity_and_its_cookie_is_not(
    site_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    client: redis.Redis,
    key: str,
    name: str,
) -> None:
    """Each execution changes Flask's session cookie."""
    for variable, value in site_environment.items():
        monkeypatch.setenv(variable, value)
    from tests.http.sites import flask_site

    browser = Browser(getattr(flask_site, name))
    assert browser.post("/login/alice").text == "alice"
    send = partial(browser.post, "/payments", json={"order": key})
    responses = [send(headers={"Idempotency-Key": key}) for _ in range(3)]

    if name == "by_session_user":
        assert [response.json for response in responses] == [{"payment": 1}] * 3
        assert request_count(client, key) == 1
    else:
        assert [response.status_code for response in responses] == [400] * 3
        assert "identity-missing" in responses[0].text
        assert "the cookie session is a signed session" in caplog.text
        assert request_count(client, key) == 0
