"""The middleware as an ASGI app: which messages it passes, holds back, hides and stores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import redis
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

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

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def protect(app: Any, idem: Idempotency, **options: Any) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(app, idem, **{"identity": anonymous, **options})


def send_all(
    app: Any, run: Run, *scopes: Any, send: Callable[[Any], Any] | None = None
) -> list[Response]:
    """Sends requests one after the other."""

    async def send_requests() -> list[Response]:
        return [await request(app, each, send=send) for each in scopes]

    responses: list[Response] = run(send_requests())
    return responses


@pytest.mark.parametrize(
    "untouched",
    [
        {"type": "lifespan"},
        scope("key", type="websocket"),
        scope("key", method="GET"),
        scope("key", method="HEAD"),
        scope("key", method="OPTIONS"),
        scope(None),
    ],
    ids=lambda scope: scope["type"] + scope.get("method", ""),
)
def test_everything_else_is_passed_to_the_app_as_it_is(idem: Idempotency, untouched: Any) -> None:
    app = App(START, MORE, END)

    async def receive() -> Any:
        return None

    async def send(message: Any) -> None:
        sent.append(message)

    sent: list[Any] = []
    asyncio.run(protect(app, idem)(untouched, receive, send))

    assert app.arguments[0] is untouched
    assert app.arguments[1:] == (receive, send)
    assert sent == [START, MORE, END]


def test_get_can_be_protected(idem: Idempotency, run: Run, key: str) -> None:
    app = App()
    send_all(protect(app, idem, methods=["get"]), run, *[scope(key, method="GET")] * 2)
    assert len(app.requests) == 1


def test_a_request_that_the_client_breaks_off_is_not_run(
    idem: Idempotency, run: Run, key: str
) -> None:
    app = App()
    messages = [*body_messages(b"{", b"}")[:1], DISCONNECT]

    response = run(request(protect(app, idem), scope(key), messages))

    assert app.requests == response.messages == []
    assert list(idem.records()) == []


def test_a_body_that_is_shorter_than_its_length_is_not_run(
    idem: Idempotency, run: Run, key: str
) -> None:
    app = App()
    response = run(request(protect(app, idem), scope(key, [("content-length", "9")]), b"short"))

    assert (response.status, app.requests) == (400, [])
    assert list(idem.records()) == []


def test_an_app_that_stops_when_the_client_disconnects_releases_its_key(
    idem: Idempotency, run: Run, key: str
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(MORE)
        await receive()
        assert await receive() is DISCONNECT

    response = run(request(protect(app, idem), scope(key), [*body_messages(b""), DISCONNECT]))

    assert response.messages == []
    assert list(idem.records()) == []


def test_a_response_is_stored_even_if_the_client_is_gone(
    idem: Idempotency, run: Run, key: str
) -> None:
    app = App()

    async def disconnected(message: Any) -> None:
        raise OSError("the client is gone")

    async def send_requests() -> Response:
        with pytest.raises(OSError, match="gone"):
            await request(protect(app, idem), scope(key), send=disconnected)
        return await request(protect(app, idem), scope(key))

    again: Response = run(send_requests())
    assert (again.status, again.body) == (200, b"2")
    assert again.headers["idempotency-replayed"] == "true"
    assert len(app.requests) == 1


def test_a_cancelled_request_releases_its_key(idem: Idempotency, run: Run, key: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        started.set()
        await asyncio.Event().wait()

    async def cancel() -> None:
        task = asyncio.ensure_future(request(protect(app, idem), scope(key)))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    started = asyncio.Event()
    run(cancel())
    assert list(idem.records()) == []


def test_an_app_that_raises_in_the_middle_of_its_response_releases_its_key(
    idem: Idempotency, run: Run, key: str
) -> None:
    with pytest.raises(ZeroDivisionError):
        send_all(protect(App(START, MORE, ZeroDivisionError()), idem), run, scope(key))
    assert list(idem.records()) == []


class TestExtensions:
    @pytest.mark.parametrize("name", ["pathsend", "zerocopysend", "push", "early_hint", "trailers"])
    def test_those_that_send_are_hidden(
        self, idem: Idempotency, run: Run, key: str, name: str
    ) -> None:
        app = App()
        extensions = {f"http.response.{name}": {}, "tls": {"client_cert_name": "alice"}}
        outer = scope(key, extensions=extensions)
        run(request(protect(app, idem), outer))

        assert app.arguments[0]["extensions"] == {"tls": {"client_cert_name": "alice"}}
        assert outer["extensions"] is extensions

    @pytest.mark.parametrize("extensions", [{}, {"tls": {}}, None])
    def test_the_scope_is_passed_as_it_is(
        self, idem: Idempotency, run: Run, key: str, extensions: Any
    ) -> None:
        app = App()
        outer = scope(key, extensions=extensions)
        run(request(protect(app, idem), outer))

        assert app.arguments[0] is outer

    def test_an_app_that_uses_one_nonetheless_fails(
        self, idem: Idempotency, run: Run, key: str
    ) -> None:
        message = {"type": "http.response.pathsend", "path": "/etc/hostname"}
        with pytest.raises(RuntimeError, match=r"http\.response\.pathsend"):
            send_all(protect(App(START, message), idem), run, scope(key))
        assert list(idem.records()) == []


def test_a_released_key_is_free_before_the_response_is_sent(
    idem: Idempotency, run: Run, key: str
) -> None:
    """A client that retries at once does not meet its own first request."""

    async def look_up(message: Any) -> None:
        records.extend(await asyncio.to_thread(list, idem.records()))

    records: list[Any] = []
    app = App({**START, "status": 429}, END)
    assert run(request(protect(app, idem), scope(key), send=look_up)).status == 429
    assert records == []


def test_header_names_are_in_lower_case(idem: Idempotency, run: Run, key: str) -> None:
    """HTTP/2 allows no others; a record may have been stored under WSGI."""
    app = App({**START, "headers": [(b"Content-Type", b"text/plain")]}, END)
    open_engine = Idempotency("redis://127.0.0.1:1", name="web", on_store_error="run")

    async def send_requests() -> list[Response]:
        return [
            await request(protect(app, idem), scope(key)),
            await request(protect(app, idem), scope(key)),
            await request(protect(app, idem), scope(key, path="/other")),
            await request(protect(App(), open_engine), scope(key)),
        ]

    first, *others = run(send_requests())
    assert first.messages[0]["headers"] == [(b"Content-Type", b"text/plain")]  # the app's own
    names = [name for response in others for name, _ in response.messages[0]["headers"]]
    assert {b"content-type", b"idempotency-replayed", b"idempotency-unprotected"} <= set(names)
    assert all(name.islower() for name in names)


class TestMounts:
    """Two apps under different prefixes, with one engine, never answer for each other."""

    @staticmethod
    def app(name: str, idem: Idempotency) -> Any:
        async def pay(request: Any) -> PlainTextResponse:
            return PlainTextResponse(name)

        return protect(Starlette(routes=[Route("/pay", pay, methods=["POST"])]), idem)

    def test_of_starlette(self, idem: Idempotency, run: Run, key: str) -> None:
        mounts = [Mount(f"/{name}", self.app(name, idem)) for name in ("a", "b")]
        scopes = [scope(key, path=path) for path in ("/a/pay", "/b/pay", "/a/pay")]
        first, other, again = send_all(Starlette(routes=mounts), run, *scopes)
        assert (first.status, first.body) == (200, b"a")
        assert (other.status, again.body) == (422, b"a")

    def test_of_servers_whose_path_has_no_prefix(
        self, idem: Idempotency, run: Run, key: str
    ) -> None:
        scopes = [scope(key, root_path=prefix) for prefix in ("/a", "/b", "/a")]
        responses = send_all(protect(App(), idem), run, *scopes)
        assert [response.status for response in responses] == [200, 422, 200]


@pytest.mark.parametrize("identity", [1, b"alice", ["alice"], True])
def test_an_identity_that_is_not_text_is_an_error(
    idem: Idempotency, run: Run, key: str, identity: Any
) -> None:
    middleware = protect(App(), idem, identity=lambda scope: identity)
    with pytest.raises(TypeError, match="identity must return text or None"):
        send_all(middleware, run, scope(key))


@pytest.mark.parametrize("identity", [None, ""])
def test_no_identity_is_shared(idem: Idempotency, run: Run, key: str, identity: Any) -> None:
    app = App()
    middleware = protect(app, idem, identity=lambda scope: identity)
    response = run(request(middleware, scope(key)))

    assert (response.status, app.requests) == (400, [])
    assert b"urn:celery-idempotent:identity-missing" in response.body


def test_an_engine_that_is_not_enabled_lets_every_request_through(
    server: Any, run: Run, key: str
) -> None:
    app = App()
    middleware = protect(app, Idempotency(server.url, name="web", enabled=False), required=True)
    responses = send_all(middleware, run, *map(scope, (key, key, None)))
    assert [response.status for response in responses] == [200, 200, 200]
    assert len(app.requests) == 3


def test_a_small_stream_is_stored_and_sent_as_a_whole(
    idem: Idempotency, run: Run, key: str
) -> None:
    app = App(START, MORE, MORE, END)
    first, again = send_all(protect(app, idem), run, scope(key), scope(key))
    assert first.messages[1:] == [
        {"type": "http.response.body", "body": b"112", "more_body": False}
    ]
    assert again.body == b"112"
    assert len(app.requests) == 1


def test_a_large_stream_is_not_held_back(idem: Idempotency, run: Run, key: str) -> None:
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
        states = [record.state.value for record in await asyncio.to_thread(list, records())]
        states_when_sent.append(states)

    async def send_requests() -> Response:
        await request(protect(app, idem), scope(key), send=look_up)
        return await request(protect(app, idem), scope(key))

    response, records = Response(), idem.records
    again: Response = run(send_requests())
    assert states_when_sent == [["COMPLETED"]] * 4
    assert again.status == 409
    assert b"response-not-stored" in again.body


def test_a_large_stream_that_comes_too_late_is_replaced(
    idem: Idempotency, run: Run, client: redis.Redis, key: str
) -> None:
    """Another execution has completed: its response is sent, and no part of this one."""
    chunk = {**MORE, "body": b"x" * (MAX_BYTES + 1)}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        client.delete(*client.keys(f"{idem.settings.key_prefix}:*"))
        assert (await request(protect(App(), idem), scope)).body == b"2"
        for message in (START, chunk, chunk, END):
            await send(message)

    late = run(request(protect(app, idem), scope(key)))
    assert (late.body, len(late.messages)) == (b"2", 2)
    assert late.headers["idempotency-replayed"] == "true"


def test_a_large_error_is_sent_and_not_stored(idem: Idempotency, run: Run, key: str) -> None:
    app = App({**START, "status": 500}, {**MORE, "body": b"x" * (MAX_BYTES + 1)}, END)
    response = run(request(protect(app, idem), scope(key)))

    assert (response.status, len(response.body)) == (500, MAX_BYTES + 2)
    assert list(idem.records()) == []


def test_what_the_app_does_after_its_response_delays_nobody(
    idem: Idempotency, run: Run, key: str
) -> None:
    """A retry gets the response while the background task of the first request runs."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in (START, END):
            await send(message)
        again.append(await request(protect(app, idem), scope))

    again: list[Response] = []
    assert run(request(protect(app, idem), scope(key))).body == again[0].body == b"2"
