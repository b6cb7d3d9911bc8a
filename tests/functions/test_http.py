"""The HTTP contract of the middleware, with a real server and a real client."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from celery_idempotent import Idempotency
from celery_idempotent.contrib.asgi import IdempotencyMiddleware
from celery_idempotent.testing.ports import Ports
from celery_idempotent.testing.server import RedisServer
from tests.waiting import eventually

REPOSITORY = Path(__file__).parents[2]


class Web:
    """A uvicorn process that serves an app and can be killed."""

    def __init__(self, app: str, environment: dict[str, str]) -> None:
        self._ports = Ports(1)
        (self.port,) = self._ports.numbers
        self._command = [sys.executable, "-m", "uvicorn", app, "--port", str(self.port)]
        self._command += ["--log-level", "warning"]
        self._environment = {**os.environ, **environment}
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, cwd=REPOSITORY, env=self._environment, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.client.get("/")
            except httpx.TransportError:
                assert time.monotonic() < deadline, "uvicorn does not reply"
                time.sleep(0.05)
            else:
                return

    @property
    def pid(self) -> int:
        return self._process.pid

    def post(self, path: str, key: str | None, body: Any, **headers: str) -> httpx.Response:
        if key is not None:
            headers["Idempotency-Key"] = key
        return self.client.post(path, json=body, headers=headers)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self.client.close()
        self._ports.stop()


@contextmanager
def serving(app: str, **environment: str) -> Iterator[Web]:
    web = Web(app, environment)
    try:
        yield web
    finally:
        web.stop()


@pytest.fixture(scope="module")
def web(server: RedisServer) -> Iterator[Web]:
    with serving("tests.functions.web:api", STORE_URL=server.url) as web:
        yield web


def request_count(client: redis.Redis, order: str) -> int:
    value: Any = client.get(f"requests:{order}")
    return int(value or 0)


class TestContract:
    def test_400_without_a_key(self, web: Web, client: redis.Redis, key: str) -> None:
        response = web.post("/payments", None, {"order": key})

        assert response.status_code == 400
        assert response.headers["content-type"] == "application/problem+json"
        assert "Idempotency-Key" in response.json()["detail"]
        assert request_count(client, key) == 0

    @pytest.mark.parametrize("invalid", ["", '""', "x" * 256])
    def test_400_with_an_invalid_key(self, web: Web, invalid: str) -> None:
        assert web.post("/payments", invalid, {"order": "1"}).status_code == 400

    def test_400_with_two_keys(self, web: Web) -> None:
        headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]

        assert web.client.post("/payments", json={}, headers=headers).status_code == 400

    def test_a_retry_gets_the_first_response(self, web: Web, client: redis.Redis, key: str) -> None:
        first = web.post("/payments", key, {"order": key})
        again = web.post("/payments", f'"{key}"', {"order": key})  # quoted as in the draft

        assert (first.status_code, again.status_code) == (201, 201)
        assert first.content == again.content == b'{"payment":1,"attempt":1}'
        assert first.headers["location"] == again.headers["location"] == "/payments/1"
        assert first.headers.get_list("set-cookie") == again.headers.get_list("set-cookie")
        assert len(again.headers.get_list("set-cookie")) == 2
        assert "idempotency-replayed" not in first.headers
        assert again.headers["idempotency-replayed"] == "true"
        assert (request_count(client, key), request_count(client, f"{key}:after")) == (1, 1)

    def test_409_while_the_first_request_runs(
        self, web: Web, client: redis.Redis, key: str
    ) -> None:
        body = {"order": key, "seconds": 1.5}
        responses: list[httpx.Response] = []
        first = threading.Thread(target=lambda: responses.append(web.post("/slow", key, body)))
        first.start()
        while request_count(client, key) == 0:
            time.sleep(0.01)

        second = web.post("/slow", key, body)
        first.join()
        third = web.post("/slow", key, body)

        assert second.status_code == 409
        assert second.headers["retry-after"] == "1"
        assert responses[0].json() == third.json() == {"payment": 1}

    @pytest.mark.parametrize("change", ["body", "path", "query"])
    def test_422_for_another_request_with_the_same_key(
        self, web: Web, key: str, change: str
    ) -> None:
        web.post("/payments", key, {"order": key})

        path = {"path": "/slow", "query": "/payments?a=1"}.get(change, "/payments")
        body = {"order": key, "seconds": 0} if change == "body" else {"order": key}
        assert web.post(path, key, body).status_code == 422

    def test_clients_do_not_share_keys(self, web: Web, key: str) -> None:
        responses = [
            web.post("/payments", key, {"order": key}, Authorization=f"Bearer {client}")
            for client in ("alice", "bob", "alice")
        ]

        assert [response.json()["payment"] for response in responses] == [1, 2, 1]

    @pytest.mark.parametrize("status", [200, 302, 404, 422])
    def test_a_response_below_500_is_stored(self, web: Web, key: str, status: int) -> None:
        responses = [web.post(f"/status/{status}", key, {"order": key}) for _ in range(2)]

        assert [response.status_code for response in responses] == [status] * 2
        assert [response.text for response in responses] == ["1", "1"]

    def test_a_response_from_500_is_not_stored(self, web: Web, key: str) -> None:
        responses = [web.post("/status/503", key, {"order": key}) for _ in range(2)]

        assert [response.status_code for response in responses] == [503, 503]
        assert [response.text for response in responses] == ["1", "2"]

    def test_an_error_of_the_app_is_not_stored(
        self, web: Web, client: redis.Redis, key: str
    ) -> None:
        for _ in range(2):
            # uvicorn closes the connection after an error: each request needs a new one.
            response = web.post("/broken", key, {"order": key}, Connection="close")
            assert response.status_code == 500
        assert request_count(client, key) == 2

    def test_413_for_a_body_above_the_limit(self, web: Web, key: str) -> None:
        assert web.post("/payments", key, {"order": "x" * 2000}).status_code == 413

    def test_a_request_that_needs_no_key_is_passed_to_the_app(self, web: Web, key: str) -> None:
        assert [web.post("/optional", None, {"order": key}).json() for _ in range(2)] == [1, 2]
        assert web.client.get("/nonesuch").status_code == 404

    def test_503_if_the_store_is_unavailable(
        self, server: RedisServer, client: redis.Redis, key: str
    ) -> None:
        unavailable = "redis://127.0.0.1:1"
        with serving(
            "tests.functions.web:api", STORE_URL=server.url, UNAVAILABLE_URL=unavailable
        ) as web:
            response = web.post("/payments", key, {"order": key})

        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert request_count(client, key) == 0


def test_after_a_crash_retries_get_409_until_the_lease_ends_and_then_run(
    web: Web, client: redis.Redis, key: str
) -> None:
    body = {"order": key, "seconds": 60}

    def send_request() -> None:
        with pytest.raises(httpx.TransportError):
            web.post("/slow", key, body)

    request = threading.Thread(target=send_request)
    request.start()
    while request_count(client, key) == 0:
        time.sleep(0.01)
    web.kill()
    request.join()
    web.start()

    statuses = []
    deadline = time.monotonic() + 30
    while not statuses or statuses[-1] == 409:
        assert time.monotonic() < deadline
        statuses.append(web.post("/slow", key, body).status_code)
        time.sleep(0.05)

    assert statuses[-1] == 200
    assert set(statuses[:-1]) <= {409}
    assert web.post("/slow", key, body).json() == {"payment": 2}
    assert request_count(client, key) == 2


def test_a_client_that_closes_a_stream_cancels_the_awaited_function(
    web: Web, server: RedisServer, client: redis.Redis, key: str
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

    with web.client.stream("GET", f"/stream/{key}") as response:
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


def test_a_request_that_the_client_breaks_off_is_not_run(
    server: RedisServer, client: redis.Redis, key: str
) -> None:
    app_calls = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        app_calls.append(await receive())

    messages = [
        {"type": "http.request", "body": b'{"order": 1}', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError(f"sent to a closed connection: {message}")

    async def request() -> None:
        idem = Idempotency(server.url)
        headers = [(b"idempotency-key", key.encode())]
        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b""}
        await IdempotencyMiddleware(app, idem)({**scope, "headers": headers}, receive, send)
        await idem.aclose()

    names = set(client.scan_iter())
    asyncio.run(request())

    assert app_calls == []
    assert set(client.scan_iter()) == names


def test_the_middleware_works_with_django(idem: Idempotency, key: str) -> None:
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from django.http import HttpRequest, JsonResponse
    from django.urls import path
    from django.views.decorators.csrf import csrf_exempt

    payments = []

    @csrf_exempt
    async def pay(request: HttpRequest) -> JsonResponse:
        payments.append(request.body)
        return JsonResponse({"payment": len(payments)}, status=201)

    class Urls:
        urlpatterns = (path("payments", pay),)

    settings.configure(ROOT_URLCONF=Urls, ALLOWED_HOSTS=["*"], SECRET_KEY=key)
    app = IdempotencyMiddleware(get_asgi_application(), idem)

    async def send_requests() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            headers = {"Idempotency-Key": key}
            responses = [await client.post("/payments", content=b"1", headers=headers)]
            responses.append(await client.post("/payments", content=b"1", headers=headers))
            responses.append(await client.post("/payments", content=b"2", headers=headers))
            responses.append(await client.post("/payments", content=b"2"))
        await idem.aclose()
        return responses

    responses = asyncio.run(send_requests())
    assert [response.status_code for response in responses] == [201, 201, 422, 400]
    assert responses[0].content == responses[1].content == b'{"payment": 1}'
    assert payments == [b"1"]
