"""The contract of HTTP endpoints: the same behind every kind of server and framework."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import redis

from tests.conftest import exhaustive_except
from tests.http.drivers.web_server import (
    CHUNK,
    GTHREAD,
    MAX_BYTES,
    UVICORN,
    DjangoServer,
    DrfServer,
    WebServer,
    post,
    request_count,
    serving,
)
from tests.waiting import eventually

SITES = {
    "fastapi-uvicorn": ("tests.http.sites.fastapi_site:app", UVICORN, WebServer),
    "flask-gthread": ("tests.http.sites.flask_site:app", GTHREAD, WebServer),
    "fastapi-routes-uvicorn": ("tests.http.sites.fastapi_site:routes_app", UVICORN, WebServer),
    "flask-routes-gthread": ("tests.http.sites.flask_site:routes_app", GTHREAD, WebServer),
    "drf-gthread": ("tests.http.sites.drf_site:application", GTHREAD, DrfServer),
    "django-gthread": ("django.core.wsgi:get_wsgi_application()", GTHREAD, DjangoServer),
    "django-uvicorn": ("django.core.asgi:get_asgi_application()", UVICORN, DjangoServer),
}
#: A site of each framework.
IN_SHORT = ("fastapi-uvicorn", "flask-routes-gthread", "drf-gthread", "django-uvicorn")


@pytest.fixture(scope="module", params=exhaustive_except(SITES, *IN_SHORT))
def web(request: pytest.FixtureRequest) -> Iterator[WebServer]:
    app, server, kind = SITES[request.param]
    fixture = "django_environment" if kind in (DjangoServer, DrfServer) else "site_environment"
    with serving(app, server, kind=kind, **request.getfixturevalue(fixture)) as web:
        yield web


@pytest.fixture(scope="module")
def alice(web: WebServer) -> Iterator[httpx.Client]:
    client = web.user("alice")
    yield client
    client.close()


@pytest.fixture(scope="module")
def bob(web: WebServer) -> Iterator[httpx.Client]:
    client = web.user("bob")
    yield client
    client.close()


def problem(response: httpx.Response) -> str:
    """Returns the status and the name of a problem."""
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["status"] == response.status_code
    assert document["title"]
    assert document["detail"]
    base, _, name = document["type"].rpartition(":")
    assert base == "urn:celery-idempotent"
    return f"{response.status_code} {name}"


class TestKey:
    def test_a_request_without_a_key_is_passed_to_the_app(
        self, alice: httpx.Client, key: str
    ) -> None:
        responses = [post(alice, "/payments", None, {"order": key}) for _ in range(2)]

        assert [response.json()["payment"] for response in responses] == [1, 2]

    def test_400_without_a_required_key(
        self, alice: httpx.Client, client: redis.Redis, key: str
    ) -> None:
        response = post(alice, "/required/payments", None, {"order": key})

        assert problem(response) == "400 key-missing"
        assert request_count(client, key) == 0

    @pytest.mark.parametrize("invalid", ["", "x" * 256, "a,b"])
    def test_400_with_a_malformed_key(self, alice: httpx.Client, invalid: str) -> None:
        response = post(alice, "/payments", invalid, {"order": "1"})

        assert problem(response) == "400 key-invalid"

    def test_400_with_two_keys(self, alice: httpx.Client) -> None:
        headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]

        assert problem(alice.post("/payments", json={}, headers=headers)) == "400 key-invalid"

    def test_400_without_an_identity(self, web: WebServer, client: redis.Redis, key: str) -> None:
        headers = {"X-CSRFToken": "x" * 32, "Cookie": f"csrftoken={'x' * 32}"}
        response = post(web.client, "/payments", key, {"order": key}, **headers)

        assert problem(response) == "400 identity-missing"
        assert "Authenticate" in response.json()["detail"]
        assert "anonymous" in response.json()["detail"]
        assert request_count(client, key) == 0

    def test_a_key_of_a_get_request_means_nothing(self, alice: httpx.Client, key: str) -> None:
        headers = {"Idempotency-Key": key}
        responses = [alice.get(f"/payments/{key}", headers=headers) for _ in range(2)]

        assert [response.json()["payment"] for response in responses] == [1, 2]

    def test_two_identities_do_not_share_a_key(
        self, alice: httpx.Client, bob: httpx.Client, key: str
    ) -> None:
        responses = [post(c, "/payments", key, {"order": key}) for c in (alice, bob, alice)]

        assert [response.json()["payment"] for response in responses] == [1, 2, 1]


class TestReplay:
    def test_a_retry_gets_the_first_response(
        self, alice: httpx.Client, client: redis.Redis, key: str
    ) -> None:
        first = post(alice, "/payments", key, {"order": key})
        again = post(alice, "/payments", f'"{key}"', {"order": key})  # quoted as in the draft

        assert (first.status_code, again.status_code) == (201, 201)
        assert first.content == again.content
        assert first.json().items() >= {"payment": 1, "attempt": 1}.items()
        assert first.headers["location"] == again.headers["location"] == "/payments/1"
        assert first.headers["content-type"] == again.headers["content-type"]
        assert "idempotency-replayed" not in first.headers
        assert again.headers["idempotency-replayed"] == "true"
        assert request_count(client, key) == 1

    def test_a_cookie_reaches_the_first_caller_alone(self, alice: httpx.Client, key: str) -> None:
        first = post(alice, "/payments", key, {"order": key})
        again = post(alice, "/payments", key, {"order": key})

        cookies = {line.partition("=")[0] for line in first.headers.get_list("set-cookie")}
        assert cookies >= {"a", "b"}
        assert again.headers.get_list("set-cookie") == []

    def test_a_body_that_is_not_text_is_replayed_byte_by_byte(
        self, alice: httpx.Client, key: str
    ) -> None:
        body = bytes(range(256))
        headers = {"Idempotency-Key": key, "Content-Type": "application/octet-stream"}
        responses = [alice.post("/echo", content=body, headers=headers) for _ in range(2)]

        assert [response.content for response in responses] == [body, body]
        assert responses[1].headers["idempotency-replayed"] == "true"

    def test_a_chunked_body_equals_one_of_known_length(
        self, web: WebServer, alice: httpx.Client, client: redis.Redis, key: str
    ) -> None:
        body = b'{"order": "%s"}' % key.encode()
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        first = alice.post("/status/200", content=iter([body[:5], body[5:]]), headers=headers)
        if web.reads_no_chunked_body:
            assert problem(first) == "411 length-required"
            return
        again = alice.post("/status/200", content=body, headers=headers)

        assert first.text == again.text == "1"
        assert request_count(client, key) == 1

    def test_an_error_of_the_app_is_not_stored(
        self, alice: httpx.Client, client: redis.Redis, key: str
    ) -> None:
        for _ in range(2):
            # uvicorn closes the connection after an error: each request needs a new one.
            response = post(alice, "/broken", key, {"order": key}, Connection="close")
            assert response.status_code == 500
        assert request_count(client, key) == 2

    def test_a_response_that_is_too_large_is_sent_once(
        self, alice: httpx.Client, client: redis.Redis, key: str
    ) -> None:
        first = post(alice, "/chunks/30", key, {"order": key})
        again = post(alice, "/chunks/30", key, {"order": key})

        assert first.content == 30 * CHUNK
        assert problem(again) == "409 response-not-stored"
        assert "retry-after" not in again.headers
        assert request_count(client, key) == 1


class TestRefusal:
    def test_409_while_the_first_request_runs(
        self, alice: httpx.Client, client: redis.Redis, key: str
    ) -> None:
        body = {"order": key}
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(post, alice, "/slow", key, body)
            eventually(lambda: request_count(client, key), "the first request runs")
            second = post(alice, "/slow", key, body)
            client.rpush(f"release:{key}", "go")
            response = first.result()
        third = post(alice, "/slow", key, body)

        assert problem(second) == "409 request-in-progress"
        assert second.headers["retry-after"] == "1"
        assert response.json() == third.json() == {"payment": 1}

    @pytest.mark.parametrize("change", ["body", "path", "query", "method", "content-type"])
    def test_422_for_another_request_with_the_same_key(
        self, alice: httpx.Client, client: redis.Redis, key: str, change: str
    ) -> None:
        post(alice, "/status/200", key, {"order": key})

        method = "PATCH" if change == "method" else "POST"
        path = {"path": "/status/201", "query": "/status/200?a=1"}.get(change, "/status/200")
        body = {"order": key, "new": 1} if change == "body" else {"order": key}
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        if change == "content-type":
            headers["Content-Type"] += "; charset=utf-8"
        reused = alice.request(method, path, json=body, headers=headers)

        # FastAPI's and Flask's routes know no PATCH, but that is for the app to say.
        assert problem(reused) == "422 key-reused"
        assert request_count(client, key) == 1

    def test_403_for_a_replay_that_is_not_authorized(
        self, alice: httpx.Client, client: redis.Redis, key: str
    ) -> None:
        first = post(alice, "/payments", key, {"order": key})
        client.set(f"revoked:{key}", "yes")
        refused = post(alice, "/payments", key, {"order": key})
        client.delete(f"revoked:{key}")
        again = post(alice, "/payments", key, {"order": key})

        assert problem(refused) == "403 replay-forbidden"
        assert first.content == again.content not in refused.content
        assert request_count(client, key) == 1

    def test_413_for_a_body_above_the_limit(
        self, web: WebServer, alice: httpx.Client, client: redis.Redis, key: str
    ) -> None:
        body = b'{"order": "%s"}' % key.encode() + b" " * MAX_BYTES
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        headers["Connection"] = "close"  # a server closes it if much of a body is not read
        contents: list[Any] = [body, iter([body[:1000], body[1000:]])]
        for content in contents[: 1 if web.reads_no_chunked_body else 2]:
            response = alice.post("/payments", content=content, headers=headers)

            assert problem(response) == "413 body-too-large"
        assert request_count(client, key) == 0

    def test_a_refused_request_leaves_nothing(
        self, alice: httpx.Client, client: redis.Redis, key: str
    ) -> None:
        body = {"order": key}
        large = {**body, "padding": "x" * MAX_BYTES}
        refused = [
            post(alice, "/payments", key, large, Connection="close"),
            post(alice, "/payments", f"{key}, {key}", body),
        ]
        first = post(alice, "/payments", key, body)

        assert [response.status_code for response in [*refused, first]] == [413, 400, 201]
        assert request_count(client, key) == 1


class TestDisconnect:
    @staticmethod
    def send(web: WebServer, client: httpx.Client, path: str, key: str, size: int) -> Any:
        """Sends a request with the first `size` bytes of its body; returns the connection."""
        headers = {"Idempotency-Key": key}
        request = client.build_request("POST", path, json={"order": key}, headers=headers)
        head = [f"POST {path} HTTP/1.1", *(": ".join(field) for field in request.headers.items())]
        connection = socket.create_connection(("127.0.0.1", web.port))
        connection.sendall("\r\n".join([*head, "", ""]).encode() + request.content[:size])
        return connection

    def test_in_the_middle_of_a_request(
        self, web: WebServer, alice: httpx.Client, client: redis.Redis, key: str
    ) -> None:
        self.send(web, alice, "/payments", key, 5).close()
        assert post(alice, "/payments", key, {"order": key}).status_code == 201
        assert request_count(client, key) == 1

    def test_in_the_middle_of_a_response(
        self, web: WebServer, alice: httpx.Client, client: redis.Redis, key: str
    ) -> None:
        """The execution finishes, or the app stops it and it is released: a retry decides."""
        connection = self.send(web, alice, "/slow", key, 1000)
        eventually(lambda: request_count(client, key), "the request runs")
        connection.close()
        client.rpush(f"release:{key}", "go")

        def retry() -> httpx.Response | None:
            response = post(alice, "/slow", key, {"order": key})
            return None if response.status_code == 409 else response

        response = eventually(retry, "a retry gets a response")
        assert response.json() == {"payment": request_count(client, key)}
        if request_count(client, key) == 1:
            assert response.headers["idempotency-replayed"] == "true"
        else:
            assert web.stops_for_a_disconnect


def test_one_of_many_requests_at_once_is_executed(
    web: WebServer, client: redis.Redis, key: str
) -> None:
    """Every client of two users retries until it has a response."""
    users = {"alice": web.user("alice"), "bob": web.user("bob")}
    start = threading.Barrier(8)

    def retry(name: str) -> tuple[str, str]:
        start.wait()
        while True:
            response = post(users[name], "/payments", key, {"order": f"{key}:{name}"})
            if response.status_code != 409:
                return name, response.text

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(retry, ["alice", "bob"] * 4))
    for user in users.values():
        user.close()

    assert len(set(results)) == 2
    assert [request_count(client, f"{key}:{name}") for name in users] == [1, 1]
