"""``Idempotency-Key`` for HTTP: a middleware for FastAPI, Starlette, Django and any other ASGI app.

The contract is that of the IETF draft "The Idempotency-Key HTTP Header Field":

==============================================  ===================================================
no key where one is required, or an unfit one   400
the first request                               whatever the app answers
the same again, when it has been answered       the same status, headers and body
the same again, while it runs                   409, with Retry-After
the key with another request                    422
the store is away                               503, with Retry-After
==============================================  ===================================================

Answers with a status below 500 are kept; after any other, and after a crash, the request can be
made again. The whole answer is collected and stored before the client gets any of it: a client that
has seen it will see it again.
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
#: In an answer that comes from the record.
REPLAYED_HEADER = b"idempotency-replayed"
LONGEST_KEY = 255


def by_authorization(scope: Scope) -> str:
    """Who asks: whoever sends this Authorization header. A key is a secret to all others."""
    return ",".join(value.decode("latin-1") for value in _headers(scope, b"authorization"))


def always(scope: Scope) -> bool:
    """A key is required of every request with one of the methods."""
    return True


class IdempotencyMiddleware:
    """Lets each request through once for its key.

    Args:
        app: what answers.
        idem: where the records are.
        methods: that may have a key; all others pass.
        required: whether a request must have a key; by default all with these methods must.
        client: who makes a request, so that nobody gets another's answer by guessing a key.
        wait: seconds that a request waits for one under way before it gets 409.
        retry_after: seconds that a client is told to wait.
        max_body: bytes of a request's body; a longer one with a key gets 413.
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
        """As ASGI has it."""
        if scope["type"] != "http" or scope["method"] not in self._methods:
            await self._app(scope, receive, send)
            return
        keys = list(_headers(scope, KEY_HEADER))
        if not keys and not self._required(scope):
            await self._app(scope, receive, send)
            return
        key = _key_in(keys)
        if key is None:
            await self._refuse(send, 400, "Idempotency-Key must be one text of 1 to 255 letters")
            return
        try:
            body = await _body(receive, self._max_body_bytes)
        except ClientDisconnect:
            return
        if body is None:
            await self._refuse(send, 413, "The body is too long for a request with a key")
            return
        try:
            await self._once(key, body, scope, receive, send)
        except KeyReusedError:
            await self._refuse(send, 422, "This Idempotency-Key came with another request")
        except StoreUnavailableError:
            await self._refuse(send, 503, "It cannot be told whether this was done", later=True)
        except LeaseLostError:
            await self._refuse(send, 409, "Another execution of this has taken over", later=True)
        except ResultNotStoredError:
            await self._refuse(send, 409, "This was done, and its answer was not kept")
        except CorruptRecordError:
            await self._refuse(send, 500, "The record of this Idempotency-Key cannot be read")

    async def _once(
        self, key: str, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        block = self._idem.execution(
            (self._identity(scope), key),
            fingerprint=[scope["method"], scope["path"], scope["query_string"], body],
            wait_timeout=self._wait_timeout,
        )
        async with block as execution:
            if execution.decision is Decision.CONFLICT:
                await self._refuse(send, 409, "This is being done", later=True)
                return
            if execution.decision is Decision.REPLAY:
                await _respond(send, execution.replay, replayed=True)
                return
            collected = _BufferedResponse()

            async def collect(message: Message) -> None:
                if not collected.take(message):
                    return
                value = collected.value
                if collected.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                    value = await execution.complete(value)
                await _respond(send, value)

            # Without extensions: an app must not send its answer by another way.
            inner = {**scope, "extensions": {}}
            await self._app(inner, _again(body, receive), collect)

    async def _refuse(self, send: Send, status: int, detail: str, later: bool = False) -> None:
        """A problem, as RFC 9457 writes it."""
        problem = {"status": status, "title": HTTPStatus(status).phrase, "detail": detail}
        headers = [[b"content-type", b"application/problem+json"]]
        if later:
            headers.append([b"retry-after", str(self._retry_after).encode()])
        await _send(send, status, headers, json.dumps(problem).encode())


class _BufferedResponse:
    """An app's answer, as it comes."""

    def __init__(self) -> None:
        self.status = 0
        self._headers: list[list[str]] = []
        self._body = bytearray()

    def take(self, message: Message) -> bool:
        """Whether it is whole now."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._headers = [
                [name.decode("latin-1"), value.decode("latin-1")]
                for name, value in message.get("headers", ())
            ]
            return False
        self._body += message.get("body", b"")
        return message["type"] == "http.response.body" and not message.get("more_body")

    @property
    def value(self) -> dict[str, Any]:
        """Fit for any serializer."""
        body = b64encode(self._body).decode()
        return {"status": self.status, "headers": self._headers, "body": body}


async def _respond(send: Send, kept: dict[str, Any], *, replayed: bool = False) -> None:
    headers = [[n.encode("latin-1"), v.encode("latin-1")] for n, v in kept["headers"]]
    if replayed:
        headers.append([REPLAYED_HEADER, b"true"])
    await _send(send, kept["status"], headers, b64decode(kept["body"]), whole=True)


async def _send(
    send: Send, status: int, headers: list[list[bytes]], body: bytes, *, whole: bool = False
) -> None:
    if not whole:
        headers = [*headers, [b"content-length", str(len(body)).encode()]]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _headers(scope: Scope, name: bytes) -> Iterator[bytes]:
    return (value for header, value in scope["headers"] if header.lower() == name)


def _key_in(headers: list[bytes]) -> str | None:
    """The key; the draft writes it in quotes, most clients do not."""
    if len(headers) != 1:
        return None
    key = headers[0].decode("latin-1").strip()
    if len(key) > 1 and key[0] == key[-1] == '"':
        key = key[1:-1]
    return key if 0 < len(key) <= LONGEST_KEY and key.isprintable() else None


class ClientDisconnect(Exception):
    """The client has closed its connection in the middle of its request."""


async def _body(receive: Receive, most: int) -> bytes | None:
    """The whole body, or None if it is longer than `most`.

    Raises:
        ClientDisconnect: if the rest of it never comes.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > most:
            return None
        if not message.get("more_body"):
            return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    """Gives the app the body that was read already, then what the server has to say."""
    given = False

    async def once() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return once
