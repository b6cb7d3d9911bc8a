"""What is special to one framework or server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_idempotent import Idempotency
from celery_idempotent.testing.server import RedisServer
from tests.http.drivers.web_server import GUNICORN, UVICORN, WebServer, serving
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


def request_count(client: redis.Redis, order: str) -> int:
    value: Any = client.get(f"requests:{order}")
    return int(value or 0)


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
