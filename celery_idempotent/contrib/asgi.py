"""Idempotency-Key middleware for FastAPI, Starlette, Django and other ASGI apps.

It implements the IETF draft "The Idempotency-Key HTTP Header Field":

==============================================  ===================================================
a required key is missing, or a key is invalid  400
the first request                               the app's response
the same request after the first has ended      the same status, headers and body
the same request while the first one runs       409, with Retry-After
another request with the same key               422
Redis is unavailable                            503, with Retry-After
==============================================  ===================================================

Responses with a status below 500 are stored; after any other status, and after a crash, a retry
runs the request again. A response is sent only after it has been stored completely, so a client
never receives a response that a retry would not get.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Collection, Iterator, MutableMapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from celery_idempotent.errors import (
    CorruptRecordError,
    KeyReusedError,
    LeaseLostError,
    ResultNotStoredError,
    StoreUnavailableError,
)
from celery_idempotent.functions.decision import Decision

if TYPE_CHECKING:
    from celery_idempotent.functions.engine import Idempotency

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY_HEADER = b"idempotency-key"
#: Marks a response that is replayed from the record.
REPLAYED_HEADER = b"idempotency-replayed"
MAX_KEY_LENGTH = 255

INVALID_KEY = f"Send one Idempotency-Key header of 1 to {MAX_KEY_LENGTH} printable characters"
IN_PROGRESS = "A request with this Idempotency-Key is still in progress"
KEY_REUSED = "This Idempotency-Key was used for a different request; send a new key"
LEASE_LOST = "Another execution of this request has taken over; retry to get its response"
RESPONSE_NOT_STORED = "This request has completed, but its response was not stored"
CORRUPT_RECORD = "The record of this Idempotency-Key cannot be read"
STORE_UNAVAILABLE = "It is unknown whether this request was executed; retry with the same key"


def by_authorization(scope: Scope) -> str:
    """Identifies a client by its Authorization header, so that clients do not share keys."""
    return ",".join(value.decode("latin-1") for value in _headers(scope, b"authorization"))


def always(scope: Scope) -> bool:
    """Requires a key for every request with one of the middleware's methods."""
    return True


class IdempotencyMiddleware:
    """Runs each request once for its Idempotency-Key, and replays the response to retries.

    Args:
        app: the ASGI app that handles the requests.
        idem: the engine that stores the responses.
        methods: the HTTP methods to which keys apply; other requests are passed to the app.
        required: returns whether a request must have a key; by default, always.
        identity: identifies the client of a request, so that no client can read another one's
            response by guessing its key.
        wait_timeout: seconds that a request waits for a running one with its key before 409.
        retry_after: seconds in the Retry-After header.
        max_body_bytes: the largest body of a request with a key; a larger one gets 413.
    """

    def __init__(
        self,
        app: ASGIApp,
        idem: Idempotency,
        *,
        methods: Collection[str] = ("POST", "PATCH"),
        required: Callable[[Scope], bool] = always,
        identity: Callable[[Scope], str] = by_authorization,
        wait_timeout: float = 0.0,
        retry_after: int = 1,
        max_body_bytes: int = 1024 * 1024,
    ) -> None:
        self._app = app
        self._idem = idem
        self._methods = frozenset(methods)
        self._required = required
        self._identity = identity
        self._wait_timeout = wait_timeout
        self._retry_after = retry_after
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        if scope["type"] != "http" or scope["method"] not in self._methods:
            await self._app(scope, receive, send)
            return
        keys = list(_headers(scope, KEY_HEADER))
        if not keys and not self._required(scope):
            await self._app(scope, receive, send)
            return
        key = _parse_key(keys)
        if key is None:
            await self._send_problem(send, 400, INVALID_KEY)
            return
        try:
            body = await _read_body(receive, self._max_body_bytes)
        except ClientDisconnect:
            return
        if body is None:
            detail = f"The body of a request with a key is limited to {self._max_body_bytes} bytes"
            await self._send_problem(send, 413, detail)
            return
        try:
            await self._handle(key, body, scope, receive, send)
        except KeyReusedError:
            await self._send_problem(send, 422, KEY_REUSED)
        except StoreUnavailableError:
            await self._send_problem(send, 503, STORE_UNAVAILABLE, retry=True)
        except LeaseLostError:
            await self._send_problem(send, 409, LEASE_LOST, retry=True)
        except ResultNotStoredError:
            await self._send_problem(send, 409, RESPONSE_NOT_STORED)
        except CorruptRecordError:
            await self._send_problem(send, 500, CORRUPT_RECORD)

    async def _handle(
        self, key: str, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        context = self._idem.execution(
            (self._identity(scope), key),
            fingerprint=[scope["method"], scope["path"], scope["query_string"], body],
            wait_timeout=self._wait_timeout,
        )
        async with context as execution:
            if execution.decision is Decision.CONFLICT:
                await self._send_problem(send, 409, IN_PROGRESS, retry=True)
                return
            if execution.decision is Decision.REPLAY:
                await _respond(send, execution.replay, replayed=True)
                return
            response = _BufferedResponse()

            async def buffer(message: Message) -> None:
                if not response.add(message):
                    return
                stored = response.as_dict()
                if response.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                    stored = await execution.complete(stored)
                await _respond(send, stored)

            # Extensions would let the app send its response past the buffer.
            await self._app({**scope, "extensions": {}}, _replay_body(body, receive), buffer)

    async def _send_problem(
        self, send: Send, status: int, detail: str, *, retry: bool = False
    ) -> None:
        """Sends a problem document (RFC 9457)."""
        problem = {"status": status, "title": HTTPStatus(status).phrase, "detail": detail}
        headers = [[b"content-type", b"application/problem+json"]]
        if retry:
            headers.append([b"retry-after", str(self._retry_after).encode()])
        body = json.dumps(problem).encode()
        headers.append([b"content-length", str(len(body)).encode()])
        await _send(send, status, headers, body)


class _BufferedResponse:
    """Collects the messages of an app's response."""

    def __init__(self) -> None:
        self.status = 0
        self._headers: list[list[str]] = []
        self._body = bytearray()

    def add(self, message: Message) -> bool:
        """Adds `message`, and returns whether the response is complete."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._headers = [
                [name.decode("latin-1"), value.decode("latin-1")]
                for name, value in message.get("headers", ())
            ]
            return False
        self._body += message.get("body", b"")
        return message["type"] == "http.response.body" and not message.get("more_body")

    def as_dict(self) -> dict[str, Any]:
        """Returns the response in a form that every serializer accepts."""
        body = b64encode(self._body).decode()
        return {"status": self.status, "headers": self._headers, "body": body}


async def _respond(send: Send, stored: dict[str, Any], *, replayed: bool = False) -> None:
    headers = [[n.encode("latin-1"), v.encode("latin-1")] for n, v in stored["headers"]]
    if replayed:
        headers.append([REPLAYED_HEADER, b"true"])
    await _send(send, stored["status"], headers, b64decode(stored["body"]))


async def _send(send: Send, status: int, headers: list[list[bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _headers(scope: Scope, name: bytes) -> Iterator[bytes]:
    return (value for header, value in scope["headers"] if header.lower() == name)


def _parse_key(headers: list[bytes]) -> str | None:
    """Returns the key, with or without the quotes that the draft requires; None if invalid."""
    if len(headers) != 1:
        return None
    key = headers[0].decode("latin-1").strip()
    if len(key) > 1 and key[0] == key[-1] == '"':
        key = key[1:-1]
    return key if 0 < len(key) <= MAX_KEY_LENGTH and key.isprintable() else None


class ClientDisconnect(Exception):
    """The client closed its connection before it had sent the whole request."""


async def _read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """Returns the whole body, or None if it is longer than `max_bytes`.

    Raises:
        ClientDisconnect: if the client closes the connection before the end of the body.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > max_bytes:
            return None
        if not message.get("more_body"):
            return bytes(body)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the body first, then the server's further messages."""
    received = False

    async def receive_body_first() -> Message:
        nonlocal received
        if received:
            return await receive()
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body_first
