"""Idempotency-Key middleware for Flask and other WSGI apps; see docs/http.md.

For a request with a key, the middleware reads the whole body, and sends no part of the response
before it is stored or the key is released. Other requests pass unchanged, unless a key is required.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from http.client import responses as phrases
from io import BytesIO
from itertools import chain
from typing import Any

from celery_idempotent.contrib.http.identity import anonymous, by_cookie, by_header
from celery_idempotent.contrib.http.middleware import Answered, BaseMiddleware, Exchange
from celery_idempotent.contrib.http.request import fingerprint
from celery_idempotent.contrib.http.response import Headers, Response, stored_by_default
from celery_idempotent.core.store import run_sync

__all__ = ["IdempotencyMiddleware", "anonymous", "by_cookie", "by_header", "stored_by_default"]

Environ = MutableMapping[str, Any]
StartResponse = Callable[..., Callable[[bytes], object]]

READ_SIZE = 64 * 1024


class WsgiReader(BaseMiddleware):
    """Reads the body of a request."""

    def _read_body(self, environ: Environ) -> bytes:
        """Returns the body, which the app can still read."""
        terminated = environ.get("wsgi.input_terminated", False)
        declared = self._declared_length(environ, reads_chunks=terminated)
        # Unless the server terminates the input, reading past its length would block.
        left = self._max_body_bytes + 1 if terminated else declared
        body = bytearray()
        while left > 0 and (chunk := environ["wsgi.input"].read(min(left, READ_SIZE))):
            body += chunk
            left -= len(chunk)
        self._check_length(len(body), declared)
        environ["wsgi.input"], environ["wsgi.input_terminated"] = BytesIO(body), True
        environ["CONTENT_LENGTH"] = str(len(body))
        environ.pop("HTTP_TRANSFER_ENCODING", None)
        return bytes(body)


class IdempotencyMiddleware(WsgiReader):
    """The middleware as a WSGI app; option functions get the environ."""

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Handles one request."""
        if not self._applies(environ, environ["REQUEST_METHOD"]):
            return self._app(environ, start_response)  # type: ignore[no-any-return]
        return run_sync(self._handle(environ, start_response))

    async def _handle(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        async with Exchange() as exchange:
            try:
                admitted = self._admit(environ)
                if admitted is None:
                    return self._app(environ, start_response)  # type: ignore[no-any-return]
                body = self._read_body(environ)
                await self._begin(exchange, environ, admitted, fingerprint(environ, body))
                with _BufferedResponse(start_response) as buffered:
                    chunks = self._app(environ, buffered.start_response)
                    response = buffered.collect(chunks, self._max_response_bytes)
                    return buffered.release(await self._settle(exchange, environ, response))
            except Answered as answered:
                response = answered.response
                reason = response.reason or phrases.get(response.status, "Unknown")
                start_response(f"{response.status} {reason}", response.headers)
                return [response.body or b""]


class _BufferedResponse:
    """Buffers the app's response until it is settled; afterwards it is the iterable of its body."""

    def __init__(self, start_response: StartResponse) -> None:
        self._start_response = start_response
        self._status = ""
        self._headers: Headers = []
        self._body = bytearray()
        #: The chunks of the body that are still to be sent.
        self._rest: Iterator[bytes] = iter(())
        #: Whether the response was settled, and is sent.
        self._released = False
        #: Closes the app's response; the server calls it after sending a released response.
        self.close: Callable[[], object] = lambda: None

    def start_response(
        self, status: str, headers: Headers, exc_info: Any = None
    ) -> Callable[[bytes], object]:
        """The app's `start_response`."""
        if self._released:
            return self._start_response(status, headers, exc_info)
        if exc_info is not None and self._body:
            raise exc_info[1].with_traceback(exc_info[2])
        if exc_info is None and self._status:
            raise RuntimeError("the app has called start_response twice")
        self._status, self._headers = status, list(headers)
        return self._body.extend

    def collect(self, chunks: Iterable[bytes], max_bytes: int) -> Response:
        """Returns the response, or its beginning if the body is larger than `max_bytes`."""
        self.close = getattr(chunks, "close", self.close)
        self._rest = iter(chunks)
        for chunk in self._rest:
            self._body += chunk
            if len(self._body) > max_bytes:
                break
        if not self._status:
            raise RuntimeError("the app has not called start_response")
        code, _, reason = self._status.partition(" ")
        return Response(int(code), self._headers, bytes(self._body), reason)

    def release(self, added: Headers) -> Iterable[bytes]:
        """Sends the response with the `added` fields, then the app's remaining chunks."""
        self._start_response(self._status, [*self._headers, *added])
        self._released = True
        self._rest = chain([bytes(self._body)], self._rest)
        return self

    def __iter__(self) -> Iterator[bytes]:
        return self._rest

    def __enter__(self) -> _BufferedResponse:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._released:
            self.close()
