"""A WSGI server in the test's own process, which checks both sides against PEP 3333."""

from __future__ import annotations

from io import BytesIO
from typing import Any
from wsgiref.validate import validator

from werkzeug.datastructures import Headers
from werkzeug.test import create_environ


class Response:
    """What an app has sent to one request."""

    def __init__(self) -> None:
        self.status_line = ""
        self.headers = Headers()
        self.body = bytearray()

    @property
    def status(self) -> int:
        return int(self.status_line[:3])


def environ(key: str | None = None, body: bytes = b"", headers: Any = (), **changes: Any) -> Any:
    """Returns the environ of a POST request; None among `changes` removes an entry."""
    fields = [*headers] if key is None else [*headers, ("Idempotency-Key", key)]
    options = {"method": "POST", "input_stream": BytesIO(body), "headers": fields}
    values = create_environ("/pay", **options) | changes
    return {name: value for name, value in values.items() if value is not None}


def request(app: Any, environ: dict[str, Any], *, validate: bool = True) -> Response:
    """Sends a request to an app, and returns its response.

    Args:
        validate: whether to check the app, and what the app sees, against the PEP.
    """
    response = Response()

    def start_response(status: str, headers: Any, exc_info: Any = None) -> Any:
        if exc_info is not None and response.body:
            raise exc_info[1]
        response.status_line, response.headers = status, Headers(headers)
        return response.body.extend

    chunks = (validator(app) if validate else app)(environ, start_response)
    try:
        for chunk in chunks:
            response.body += chunk
    finally:
        if hasattr(chunks, "close"):
            chunks.close()
    return response
