"""A WSGI server in the test's own process, which checks both sides against PEP 3333."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from typing import Any
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator


class Response:
    """What an app has sent to one request."""

    def __init__(self) -> None:
        self.status_line = ""
        self.fields: list[tuple[str, str]] = []
        self.body = b""

    @property
    def status(self) -> int:
        return int(self.status_line[:3])

    @property
    def headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.fields}


def environ(
    key: str | None = None,
    body: bytes = b"",
    headers: Iterable[tuple[str, str]] = (),
    **changes: Any,
) -> dict[str, Any]:
    """Returns the environ of a POST request; None among `changes` removes an entry."""
    values: dict[str, Any] = {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": "/pay",
        "QUERY_STRING": "",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": BytesIO(body),
    }
    if key is not None:
        values["HTTP_IDEMPOTENCY_KEY"] = key
    for name, value in headers:
        field = name.upper().replace("-", "_")
        values[field if field in ("CONTENT_TYPE",) else f"HTTP_{field}"] = value
    setup_testing_defaults(values)
    values |= changes
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
        response.status_line, response.fields = status, list(headers)
        return write

    def write(data: bytes) -> None:
        response.body += data

    chunks = (validator(app) if validate else app)(environ, start_response)
    try:
        for chunk in chunks:
            response.body += chunk
    finally:
        if hasattr(chunks, "close"):
            chunks.close()
    return response
