"""The middleware as an ASGI app: which messages it passes, holds back, hides and stores."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import pytest
import redis

from celery_idempotent import Idempotency
from celery_idempotent.contrib.asgi import IdempotencyMiddleware, anonymous
from tests.http.drivers.asgi import (
    DISCONNECT,
    END,
    MORE,
    START,
    App,
    Response,
    body_messages,
    request,
    scope,
)
from tests.http.drivers.web_server import MAX_BYTES


class Site:
    """Sends requests with one key to apps behind the middleware."""

    def __init__(self, idem: Idempotency, run: Any, key: str) -> None:
        self.idem, self.run, self.scope = idem, run, scope(key)

    def protect(self, app: Any, **options: Any) -> IdempotencyMiddleware:
        return IdempotencyMiddleware(app, **{"idem": self.idem, "identity": anonymous, **options})

    def send(self, app: Any, *scopes: Any, **options: Any) -> list[Response]:
        """Sends requests one after the other; `send` and `body` are those of the server."""

        async def send_all() -> list[Response]:
            server = {name: options.pop(name) for name in ("send", "body") if name in options}
            protected = self.protect(app, **options)
            return [await request(protected, each, **server) for each in scopes]

        responses: list[Response] = self.run(send_all())
        return responses

    def post(self, app: Any, **options: Any) -> Response:
        """Sends one request."""
        (response,) = self.send(app, self.scope, **options)
        return response

    def states(self) -> list[str]:
        return [record.state.value for record in self.idem.records()]


@pytest.fixture
def site(idem: Idempotency, run: Any, key: str) -> Site:
    return Site(idem, run, key)


@pytest.mark.parametrize(
    "untouched",
    [
        *({"type": "lifespan"}, scope("key", type="websocket"), scope(None)),
        *(scope("key", method=method) for method in ("GET", "HEAD", "OPTIONS")),
    ],
    ids=lambda scope: scope["type"] + scope.get("method", ""),
)
def test_everything_else_is_passed_to_the_app_as_it_is(site: Site, untouched: Any) -> None:
    app = App(START, MORE, END)

    receive, send = AsyncMock(), AsyncMock()
    asyncio.run(site.protect(app)(untouched, receive, send))

    assert app.arguments[0] is untouched
    assert app.arguments[1:] == (receive, send)
    assert [sent.args for sent in send.await_args_list] == [(START,), (MORE,), (END,)]


def test_get_can_be_protected(site: Site, key: str) -> None:
    app = App()
    site.send(app, *[scope(key, method="GET")] * 2, methods=["get"])
    assert len(app.requests) == 1


def test_a_body_that_does_not_arrive_whole_is_not_run(site: Site, key: str) -> None:
    app = App()
    broken_off = [*body_messages(b"{", b"}")[:1], DISCONNECT]
    assert site.post(app, body=broken_off).messages == []
    (short,) = site.send(app, scope(key, [("content-length", "9")]), body=b"short")
    assert short.status == 400
    assert app.requests == site.states() == []


def test_an_app_that_fails_in_its_response_releases_its_key(site: Site) -> None:
    with pytest.raises(ZeroDivisionError):
        site.post(App(START, ZeroDivisionError()))
    hidden_extension = {"type": "http.response.pathsend", "path": "/etc/hostname"}
    with pytest.raises(RuntimeError, match=r"http\.response\.pathsend"):
        site.post(App(START, hidden_extension))
    assert site.states() == []


def test_an_app_that_stops_when_the_client_disconnects_releases_its_key(site: Site) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(MORE)
        await receive()
        assert await receive() is DISCONNECT

    assert site.post(app, body=[*body_messages(b""), DISCONNECT]).messages == []
    assert site.states() == []


def test_a_response_is_stored_even_if_the_client_is_gone(site: Site) -> None:
    app = App()

    async def disconnected(message: Any) -> None:
        raise OSError("the client is gone")

    with pytest.raises(OSError, match="gone"):
        site.post(app, send=disconnected)
    again = site.post(app)
    assert (again.status, again.body) == (200, b"2")
    assert again.headers["idempotency-replayed"] == "true"
    assert len(app.requests) == 1


def test_a_cancelled_request_releases_its_key(site: Site) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        started.set()
        await asyncio.Event().wait()

    async def cancel() -> None:
        task = asyncio.ensure_future(request(site.protect(app), site.scope))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    started = asyncio.Event()
    site.run(cancel())
    assert site.states() == []


@pytest.mark.parametrize("name", ["pathsend", "zerocopysend", "push", "early_hint", "trailers"])
def test_extensions_that_send_are_hidden(site: Site, key: str, name: str) -> None:
    app = App()
    tls = {"tls": {"client_cert_name": "alice"}}
    extensions = {f"http.response.{name}": {}, **tls}
    outer = scope(key, extensions=extensions)
    site.send(app, outer)

    assert app.arguments[0]["extensions"] == tls
    assert outer["extensions"] is extensions


@pytest.mark.parametrize("extensions", [{}, {"tls": {}}, None])
def test_a_scope_without_them_is_passed_as_it_is(site: Site, key: str, extensions: Any) -> None:
    app = App()
    outer = scope(key, extensions=extensions)
    site.send(app, outer)

    assert app.arguments[0] is outer


def test_a_released_key_is_free_before_the_response_is_sent(site: Site) -> None:
    """A client that retries at once does not meet its own first request."""

    async def look_up(message: Any) -> None:
        records.extend(await asyncio.to_thread(site.states))

    records: list[str] = []
    assert site.post(App({**START, "status": 429}, END), send=look_up).status == 429
    assert records == []


def test_header_names_are_in_lower_case(site: Site, key: str) -> None:
    """HTTP/2 allows no others; a record may have been stored under WSGI."""
    app = App({**START, "headers": [(b"Content-Type", b"text/plain")]}, END)
    first, *others = site.send(app, site.scope, site.scope, scope(key, path="/other"))
    open_engine = Idempotency("redis://127.0.0.1:1", name="web", on_store_error="run")
    others.append(site.post(App(), idem=open_engine))

    assert first.messages[0]["headers"] == [(b"Content-Type", b"text/plain")]  # the app's own
    names = [name for response in others for name, _ in response.messages[0]["headers"]]
    assert {b"content-type", b"idempotency-replayed", b"idempotency-unprotected"} <= set(names)
    assert all(name.islower() for name in names)


@pytest.mark.parametrize("identity", [1, b"alice", ["alice"], True])
def test_an_identity_that_is_not_text_is_an_error(site: Site, identity: Any) -> None:
    with pytest.raises(TypeError, match="identity must return text or None"):
        site.post(App(), identity=lambda scope: identity)


@pytest.mark.parametrize("identity", [None, ""])
def test_no_identity_is_shared(site: Site, identity: Any) -> None:
    app = App()
    response = site.post(app, identity=lambda scope: identity)

    assert b"urn:celery-idempotent:identity-missing" in response.body
    assert (response.status, app.requests) == (400, [])


def test_an_engine_that_is_not_enabled_lets_every_request_through(site: Site) -> None:
    app = App()
    disabled = Idempotency(site.idem.settings.redis_url, name="web", enabled=False)
    responses = site.send(app, site.scope, site.scope, scope(), idem=disabled, required=True)
    assert [response.status for response in responses] == [200, 200, 200]
    assert len(app.requests) == 3


def test_a_small_stream_is_stored_and_sent_as_a_whole(site: Site) -> None:
    app = App(START, MORE, MORE, END)
    first, again = site.send(app, site.scope, site.scope)
    whole = {"type": "http.response.body", "body": b"112", "more_body": False}
    assert first.messages[1:] == [whole]
    assert again.body == b"112"
    assert len(app.requests) == 1


def test_a_large_stream_is_not_held_back(site: Site) -> None:
    """The fact that there was a response is stored before its first byte is sent."""
    chunk = {**MORE, "body": b"x" * (MAX_BYTES // 2)}
    states_when_sent = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in (START, chunk, chunk):
            await send(message)
            assert response.messages == []
        await send(chunk)
        assert len(response.body) == 3 * len(chunk["body"])
        await send(MORE)
        assert response.messages[-1] is MORE
        await send(END)

    async def look_up(message: Any) -> None:
        response.messages.append(message)
        states_when_sent.append(await asyncio.to_thread(site.states))

    response = Response()
    site.post(app, send=look_up)
    again = site.post(app)
    assert states_when_sent == [["COMPLETED"]] * 4
    assert again.status == 409
    assert b"response-not-stored" in again.body


def test_a_large_stream_that_comes_too_late_is_replaced(site: Site, client: redis.Redis) -> None:
    """Another execution has completed: its response is sent, and no part of this one."""
    chunk = {**MORE, "body": b"x" * (MAX_BYTES + 1)}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        client.delete(*client.keys(f"{site.idem.settings.key_prefix}:*"))
        assert (await request(site.protect(App()), scope)).body == b"2"
        for message in (START, chunk, chunk, END):
            await send(message)

    late = site.post(app)
    assert (late.body, len(late.messages)) == (b"2", 2)
    assert late.headers["idempotency-replayed"] == "true"


def test_a_large_error_is_sent_and_not_stored(site: Site) -> None:
    body = {**MORE, "body": b"x" * (MAX_BYTES + 1)}
    response = site.post(App({**START, "status": 500}, body, END))

    assert (response.status, len(response.body)) == (500, MAX_BYTES + 2)
    assert site.states() == []


def test_what_the_app_does_after_its_response_delays_nobody(site: Site) -> None:
    """A retry gets the response while the background task of the first request runs."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in (START, END):
            await send(message)
        again.append(await request(site.protect(app), scope))

    again: list[Response] = []
    assert site.post(app).body == again[0].body == b"2"
