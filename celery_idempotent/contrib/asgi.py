"""Idempotency-Key middleware for FastAPI, Starlette and other ASGI apps; see docs/http.md.

For a request with a key, the middleware reads the whole body, and sends no part of the response
before it is stored or the key is released. Other requests pass unchanged, unless a key is required.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import partial
from typing import Any

from celery_idempotent.contrib.http.identity import anonymous, by_cookie, by_header
from celery_idempotent.contrib.http.middleware import Answered, BaseMiddleware, Exchange
from celery_idempotent.contrib.http.request import fingerprint
from celery_idempotent.contrib.http.response import Headers, Response, stored_by_default

__all__ = ["IdempotencyMiddleware", "anonymous", "by_cookie", "by_header", "stored_by_default"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Settle = Callable[[Response], Awaitable[Headers]]


class IdempotencyMiddleware(BaseMiddleware):
    """The middleware as an ASGI app; option functions get the scope."""

    _is_async = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        if scope["type"] != "http" or not self._applies(scope, scope["method"]):
            await self._app(scope, receive, send)
            return
        async with Exchange() as exchange:
            try:
                admitted = self._admit(scope)
                if admitted is None:
                    await self._app(scope, receive, send)
                    return
                body = await self._read_body(scope, receive)
                if body is None:
                    return
                await self._begin(exchange, scope, admitted, fingerprint(scope, body))
            except Answered as answered:
                await _send(send, answered.response)
                return
            settle = partial(self._settle, exchange, scope)
            buffered = _BufferedResponse(send, settle, self._max_response_bytes)
            await self._app(_without_sending(scope), _body_first(body, receive), buffered.send)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Returns the body, or None if the client disconnects before its end."""
        declared = self._declared_length(scope)
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
            self._check_length(len(body), 0 if more else declared)
        return bytes(body)


class _BufferedResponse:
    """Buffers the app's response until it is settled: stored, or the key is released.

    Args:
        send: sends to the client.
        settle: called once, with the whole response or a beginning larger than `max_bytes`;
            returns the fields to add to the response, or raises :class:`Answered` to send another.
    """

    def __init__(self, send: Send, settle: Settle, max_bytes: int) -> None:
        self._send = send
        self._settle = settle
        self._max_bytes = max_bytes
        self._start: Message = {}
        self._body = bytearray()
        #: None until the response is settled; then whether it is sent, and not another in its
        #: place.
        self._released: bool | None = None

    async def send(self, message: Message) -> None:
        """The app's `send`."""
        if self._released is not None:
            if self._released:
                await self._send(message)
        elif message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body" and self._start:
            self._body += message.get("body", b"")
            whole = not message.get("more_body", False)
            if whole or len(self._body) > self._max_bytes:
                await self._release(whole)
        else:
            # The app does not get the extensions `http.response.…`, whose messages would come here.
            raise RuntimeError(f"the app sent {message['type']!r} where ASGI does not allow it")

    async def _release(self, whole: bool) -> None:
        """Settles the response or its beginning, and sends it; later messages pass through.

        Args:
            whole: whether the app has sent its whole body.
        """
        fields = list(self._start.get("headers", ()))
        headers = decoded(fields)
        body = bytes(self._body)
        self._body.clear()
        try:
            added = await self._settle(Response(self._start["status"], headers, body))
        except Answered as answered:
            self._released = False
            await _send(self._send, answered.response)
            return
        self._released = True
        await self._send({**self._start, "headers": [*fields, *encoded(added)]})
        await self._send({"type": "http.response.body", "body": body, "more_body": not whole})


async def _send(send: Send, response: Response) -> None:
    headers = encoded(response.headers)
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})


def decoded(fields: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Returns ASGI header fields as text."""
    return [
        (bytes(name).decode("latin-1"), bytes(value).decode("latin-1")) for name, value in fields
    ]


def encoded(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Returns header fields in ASGI's form."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def _without_sending(scope: Scope) -> Scope:
    """Returns the scope without extensions that send a response past the middleware."""
    extensions = scope.get("extensions") or {}
    others = {name: x for name, x in extensions.items() if not name.startswith("http.response.")}
    return scope if len(others) == len(extensions) else {**scope, "extensions": others}


def _body_first(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that yields the body first, then the server's further messages."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body_first() -> Message:
        return pending.pop() if pending else await receive()

    return receive_body_first
