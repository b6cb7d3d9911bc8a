"""The contract of HTTP endpoints: the same behind every kind of server and framework."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest
from redis import Redis

from tests.conftest import exhaustive_except
from tests.http.drivers.web_server import (
    CHUNK,
    MAX_BYTES,
    SITES,
    WebServer,
    post,
    request_count,
    serving,
)
from tests.waiting import eventually

#: A site of each framework.
IN_SHORT = ("fastapi-uvicorn", "flask-routes-gthread", "drf-gthread", "django-uvicorn")


@pytest.fixture(scope="module", params=exhaustive_except(SITES, *IN_SHORT))
def web(request: pytest.FixtureRequest) -> Iterator[WebServer]:
    app, server, kind = SITES[request.param]
    fixture = "django_environment" if kind.is_django else "site_environment"
    with serving(app, server, kind=kind, **request.getfixturevalue(fixture)) as web:
        yield web


@pytest.fixture(scope="module")
def alice(web: WebServer) -> Iterator[httpx.Client]:
    with closing(web.user("alice")) as client:
        yield client


class Shop:
    """A server, and alice, who sends requests with one key; its order counts them."""

    def __init__(self, web: WebServer, alice: httpx.Client, client: Redis, key: str) -> None:
        self.web, self.alice, self.redis, self.key = web, alice, client, key

    def post(self, path: str, key: str | None = "", **headers: str) -> httpx.Response:
        """Sends the order; key None is no key, and an empty one is that of the shop."""
        key = self.key if key == "" else key
        return post(self.alice, path, key, {"order": self.key}, **headers)

    def send(self, path: str, content: Any, **options: Any) -> httpx.Response:
        """Sends a body with the key."""
        headers = {"Idempotency-Key": self.key, "Content-Type": "application/json"}
        headers |= options.pop("headers", {})
        method = options.pop("method", "POST")
        return self.alice.request(method, path, content=content, headers=headers, **options)

    @property
    def body(self) -> bytes:
        return b'{"order": "%s"}' % self.key.encode()

    @property
    def count(self) -> int:
        return request_count(self.redis, self.key)

    def wait_for_request(self) -> None:
        eventually(lambda: self.count, "the request runs")

    def release(self) -> None:
        """Lets a slow request end."""
        self.redis.rpush(f"release:{self.key}", "go")


@pytest.fixture
def shop(web: WebServer, alice: httpx.Client, client: Redis, key: str) -> Shop:
    return Shop(web, alice, client, key)


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
    def test_a_request_without_a_key_is_passed_to_the_app(self, shop: Shop) -> None:
        responses = [shop.post("/payments", None) for _ in range(2)]

        assert [response.json()["payment"] for response in responses] == [1, 2]

    def test_400_without_a_required_key(self, shop: Shop) -> None:
        response = shop.post("/required/payments", None)

        assert problem(response) == "400 key-missing"
        assert shop.count == 0

    @pytest.mark.parametrize("keys", [[""], ["x" * 256], ["a,b"], ["a", "b"]], ids=str)
    def test_400_with_a_malformed_key_or_two(self, shop: Shop, keys: list[str]) -> None:
        headers = [("Idempotency-Key", key) for key in keys]

        assert problem(shop.alice.post("/payments", json={}, headers=headers)) == "400 key-invalid"

    def test_400_without_an_identity(self, shop: Shop) -> None:
        headers = {"X-CSRFToken": "x" * 32, "Cookie": f"csrftoken={'x' * 32}"}
        response = post(shop.web.client, "/payments", shop.key, {"order": shop.key}, **headers)

        assert problem(response) == "400 identity-missing"
        for word in ("Authenticate", "anonymous"):
            assert word in response.json()["detail"]
        assert shop.count == 0

    def test_a_key_of_a_get_request_means_nothing(self, shop: Shop) -> None:
        path, headers = f"/payments/{shop.key}", {"Idempotency-Key": shop.key}
        responses = [shop.alice.get(path, headers=headers) for _ in range(2)]

        assert [response.json()["payment"] for response in responses] == [1, 2]

    def test_two_identities_do_not_share_a_key(self, shop: Shop) -> None:
        responses = [shop.post("/payments")]
        with closing(shop.web.user("bob")) as bob:
            responses.append(post(bob, "/payments", shop.key, {"order": shop.key}))
        responses.append(shop.post("/payments"))

        assert [response.json()["payment"] for response in responses] == [1, 2, 1]


class TestReplay:
    def test_a_retry_gets_the_first_response(self, shop: Shop) -> None:
        first = shop.post("/payments")
        again = shop.post("/payments", f'"{shop.key}"')  # quoted as in the draft

        assert (first.status_code, again.status_code) == (201, 201)
        assert first.content == again.content
        assert first.json().items() >= {"payment": 1, "attempt": 1}.items()
        assert first.headers["location"] == again.headers["location"] == "/payments/1"
        assert first.headers["content-type"] == again.headers["content-type"]
        assert "idempotency-replayed" not in first.headers
        assert again.headers["idempotency-replayed"] == "true"
        assert shop.count == 1

    def test_a_cookie_reaches_the_first_caller_alone(self, shop: Shop) -> None:
        first = shop.post("/payments")
        again = shop.post("/payments")

        cookies = {line.partition("=")[0] for line in first.headers.get_list("set-cookie")}
        assert cookies >= {"a", "b"}
        assert again.headers.get_list("set-cookie") == []

    def test_a_body_that_is_not_text_is_replayed_byte_by_byte(self, shop: Shop) -> None:
        body = bytes(range(256))
        headers = {"Content-Type": "application/octet-stream"}
        responses = [shop.send("/echo", body, headers=headers) for _ in range(2)]

        assert [response.content for response in responses] == [body, body]
        assert responses[1].headers["idempotency-replayed"] == "true"

    def test_a_chunked_body_equals_one_of_known_length(self, shop: Shop) -> None:
        first = shop.send("/status/200", iter([shop.body[:5], shop.body[5:]]))
        if shop.web.reads_no_chunked_body:
            assert problem(first) == "411 length-required"
            return
        again = shop.send("/status/200", shop.body)

        assert first.text == again.text == "1"
        assert shop.count == 1

    def test_an_error_of_the_app_is_not_stored(self, shop: Shop) -> None:
        for _ in range(2):
            # uvicorn closes the connection after an error: each request needs a new one.
            response = shop.post("/broken", Connection="close")
            assert response.status_code == 500
        assert shop.count == 2

    def test_a_response_that_is_too_large_is_sent_once(self, shop: Shop) -> None:
        first = shop.post("/chunks/30")
        again = shop.post("/chunks/30")

        assert first.content == 30 * CHUNK
        assert problem(again) == "409 response-not-stored"
        assert "retry-after" not in again.headers
        assert shop.count == 1


class TestRefusal:
    def test_409_while_the_first_request_runs(self, shop: Shop) -> None:
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(shop.post, "/slow")
            shop.wait_for_request()
            second = shop.post("/slow")
            shop.release()
            response = first.result()
        third = shop.post("/slow")

        assert problem(second) == "409 request-in-progress"
        assert second.headers["retry-after"] == "1"
        assert response.json() == third.json() == {"payment": 1}

    @pytest.mark.parametrize("change", ["body", "path", "query", "method", "content-type"])
    def test_422_for_another_request_with_the_same_key(self, shop: Shop, change: str) -> None:
        shop.send("/status/200", shop.body)

        changes: dict[str, Any] = {
            "body": {"content": shop.body[:-1] + b', "new": 1}'},
            "path": {"path": "/status/201"},
            "query": {"path": "/status/200?a=1"},
            "method": {"method": "PATCH"},
            "content-type": {"headers": {"Content-Type": "application/json; charset=utf-8"}},
        }
        reused = shop.send(**{"path": "/status/200", "content": shop.body, **changes[change]})

        # FastAPI's and Flask's routes know no PATCH, but that is for the app to say.
        assert problem(reused) == "422 key-reused"
        assert shop.count == 1

    def test_403_for_a_replay_that_is_not_authorized(self, shop: Shop) -> None:
        first = shop.post("/payments")
        shop.redis.set(f"revoked:{shop.key}", "yes")
        refused = shop.post("/payments")
        shop.redis.delete(f"revoked:{shop.key}")
        again = shop.post("/payments")

        assert problem(refused) == "403 replay-forbidden"
        assert first.content == again.content not in refused.content
        assert shop.count == 1

    def test_413_for_a_body_above_the_limit(self, shop: Shop) -> None:
        body = shop.body + b" " * MAX_BYTES
        headers = {"Connection": "close"}  # a server closes it if much of a body is not read
        contents: list[Any] = [body, iter([body[:1000], body[1000:]])]
        for content in contents[: 1 if shop.web.reads_no_chunked_body else 2]:
            response = shop.send("/payments", content, headers=headers)

            assert problem(response) == "413 body-too-large"
        assert shop.count == 0
        assert shop.post("/payments").status_code == 201, "the key is free"


class TestDisconnect:
    @staticmethod
    def send(shop: Shop, path: str, size: int) -> Any:
        """Sends a request with the first `size` bytes of its body; returns the connection."""
        headers, body = {"Idempotency-Key": shop.key}, {"order": shop.key}
        request = shop.alice.build_request("POST", path, json=body, headers=headers)
        head = [f"POST {path} HTTP/1.1", *(": ".join(field) for field in request.headers.items())]
        connection = socket.create_connection(("127.0.0.1", shop.web.port))
        connection.sendall("\r\n".join([*head, "", ""]).encode() + request.content[:size])
        return connection

    def test_in_the_middle_of_a_request(self, shop: Shop) -> None:
        self.send(shop, "/payments", 5).close()
        assert shop.post("/payments").status_code == 201
        assert shop.count == 1

    def test_in_the_middle_of_a_response(self, shop: Shop) -> None:
        """The execution finishes, or the app stops it and it is released: a retry decides."""
        connection = self.send(shop, "/slow", 1000)
        shop.wait_for_request()
        connection.close()
        shop.release()

        def retry() -> httpx.Response | None:
            response = shop.post("/slow")
            return None if response.status_code == 409 else response

        response = eventually(retry, "a retry gets a response")
        assert response.json() == {"payment": shop.count}
        if shop.count == 1:
            assert response.headers["idempotency-replayed"] == "true"
        else:
            assert shop.web.stops_for_a_disconnect


def test_one_of_many_requests_at_once_is_executed(web: WebServer, client: Redis, key: str) -> None:
    """Every client of two users retries until it has a response."""
    start = threading.Barrier(8)

    def retry(name: str, user: httpx.Client) -> tuple[str, str]:
        start.wait()
        while True:
            response = post(user, "/payments", key, {"order": f"{key}:{name}"})
            if response.status_code != 409:
                return name, response.text

    with (
        closing(web.user("alice")) as alice,
        closing(web.user("bob")) as bob,
        ThreadPoolExecutor(8) as threads,
    ):
        results = list(threads.map(retry, ["alice", "bob"] * 4, [alice, bob] * 4))

    assert len(set(results)) == 2
    assert [request_count(client, f"{key}:{name}") for name in ("alice", "bob")] == [1, 1]
