"""Which parts of a response the ASGI middleware holds back, and when it is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import redis

from celery_idempotent import Idempotency
from celery_idempotent.contrib.asgi import IdempotencyMiddleware, anonymous
from tests.http.drivers.asgi import END, MORE, START, App, Response, request, scope
from tests.http.drivers.web_server import MAX_BYTES

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def protect(app: Any, idem: Idempotency) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(app, idem, identity=anonymous)


def test_a_small_stream_is_stored_and_sent_as_a_whole(
    idem: Idempotency, run: Run, key: str
) -> None:
    app = App(START, MORE, MORE, END)

    async def send_requests() -> list[Response]:
        return [await request(protect(app, idem), scope(key)) for _ in range(2)]

    first, again = run(send_requests())
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
    first = run(request(protect(app, idem), scope(key)))
    assert first.body == again[0].body == b"2"
