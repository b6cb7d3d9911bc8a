"""An ASGI server in the test's own process: sends one request, and collects what the app sends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

Message = dict[str, Any]

DISCONNECT: Message = {"type": "http.disconnect"}


def scope(key: str | None = None, headers: Iterable[tuple[str, str]] = (), **changes: Any) -> Any:
    """Returns the scope of a POST request; `changes` replace its entries."""
    fields = [*headers] if key is None else [*headers, ("Idempotency-Key", key)]
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in fields]
    default = {"path": "/pay", "root_path": "", "query_string": b"", "headers": encoded}
    return {"type": "http", "method": "POST", **default, **changes}


def body_messages(*chunks: bytes) -> list[Message]:
    """Returns the messages of a body that arrives in chunks."""
    more = [True] * (len(chunks) - 1) + [False]
    return [
        {"type": "http.request", "body": chunk, "more_body": more_body}
        for chunk, more_body in zip(chunks, more, strict=True)
    ]


class Response:
    """What an app has sent to one request."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        fields = self.messages[0]["headers"]
        return {bytes(name).decode().lower(): bytes(value).decode() for name, value in fields}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])


async def request(app: Any, scope: Any, body: Any = b"", send: Any = None) -> Response:
    """Sends a request to an app, and returns when the app ends.

    Args:
        body: the body, or the messages that the app receives before the client waits.
        send: a coroutine function: what the server does with a message.
    """
    messages = body if isinstance(body, list) else body_messages(body)
    response = Response()

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def collect(message: Message) -> None:
        response.messages.append(message)
        if send is not None:
            await send(message)

    await app(scope, receive, collect)
    return response


START = {"type": "http.response.start", "status": 200, "headers": []}
MORE = {"type": "http.response.body", "body": b"1", "more_body": True}
END = {"type": "http.response.body", "body": b"2"}


class App:
    """Counts its requests, and sends the messages of its response."""

    def __init__(self, *messages: Any) -> None:
        self.messages = messages or (START, END)
        self.requests: list[Any] = []
        self.arguments: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.arguments = (scope, receive, send)
        self.requests.append(await receive() if scope["type"] == "http" else None)
        for message in self.messages:
            if isinstance(message, Exception):
                raise message
            await send(message)
