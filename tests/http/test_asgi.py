"""The middleware as an ASGI app: which messages it passes, holds back and hides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
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

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def protect(app: Any, idem: Idempotency, **options: Any) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(app, idem, **{"identity": anonymous, **options})


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

    async def send_requests() -> None:
        for _ in range(2):
            await request(protect(app, idem, methods=["get"]), scope(key, method="GET"))

    run(send_requests())
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
    async def send_request() -> None:
        with pytest.raises(ZeroDivisionError):
            await request(protect(App(START, MORE, ZeroDivisionError()), idem), scope(key))

    run(send_request())
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

        async def send_request() -> None:
            with pytest.raises(RuntimeError, match=r"http\.response\.pathsend"):
                await request(protect(App(START, message), idem), scope(key))

        run(send_request())
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

        async def send_requests() -> list[Response]:
            app = Starlette(routes=mounts)
            paths = ("/a/pay", "/b/pay", "/a/pay")
            return [await request(app, scope(key, path=path)) for path in paths]

        first, other, again = run(send_requests())
        assert (first.status, first.body) == (200, b"a")
        assert (other.status, again.body) == (422, b"a")

    def test_of_servers_whose_path_has_no_prefix(
        self, idem: Idempotency, run: Run, key: str
    ) -> None:
        async def send_requests() -> list[Response]:
            return [
                await request(protect(App(), idem), scope(key, root_path=prefix))
                for prefix in ("/a", "/b", "/a")
            ]

        assert [response.status for response in run(send_requests())] == [200, 422, 200]


def test_a_multipart_body_is_the_same_with_another_boundary(
    idem: Idempotency, run: Run, key: str
) -> None:
    app = App()

    async def upload(boundary: str, content: str) -> int:
        body = f"--{boundary}\r\nContent-Disposition: form-data; name=f\r\n\r\n{content}\r\n"
        headers = [("content-type", f'multipart/form-data; boundary="{boundary}"')]
        end = f"--{boundary}--\r\n"
        return (
            await request(protect(app, idem), scope(key, headers), (body + end).encode())
        ).status

    async def send_requests() -> list[int]:
        return [await upload("one", "a"), await upload("two", "a"), await upload("one", "b")]

    assert run(send_requests()) == [200, 200, 422]
    assert len(app.requests) == 1


@pytest.mark.parametrize("identity", [1, b"alice", ["alice"], True])
def test_an_identity_that_is_not_text_is_an_error(
    idem: Idempotency, run: Run, key: str, identity: Any
) -> None:
    async def send_request() -> None:
        middleware = protect(App(), idem, identity=lambda scope: identity)
        with pytest.raises(TypeError, match="identity must return text or None"):
            await request(middleware, scope(key))

    run(send_request())


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

    async def send_requests() -> list[int]:
        return [(await request(middleware, scope(k))).status for k in (key, key, None)]

    assert run(send_requests()) == [200, 200, 200]
    assert len(app.requests) == 3
