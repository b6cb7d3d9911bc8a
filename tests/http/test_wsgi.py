"""The middleware as a WSGI app: how it reads, calls the app and sends (PEP 3333)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from io import BytesIO
from typing import Any
from unittest.mock import Mock
from wsgiref.util import FileWrapper
from wsgiref.validate import validator

import pytest

from celery_idempotent import Idempotency
from celery_idempotent.contrib.wsgi import IdempotencyMiddleware, anonymous
from tests.http.drivers.web_server import MAX_BYTES
from tests.http.drivers.wsgi import Response, environ, request

OK = ("200 OK", [("Content-Type", "text/plain")])


class Body:
    """An iterable that counts how often it is closed."""

    def __init__(self, *chunks: bytes, error: type[Exception] | None = None) -> None:
        self.chunks, self.error = iter(chunks), error
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        yield from self.chunks
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed += 1


class App:
    """Counts its requests, reads them, and returns its body."""

    def __init__(self, body: Any = b"ok", status: str = "200 OK") -> None:
        self.body = [body] if isinstance(body, bytes) else body
        self.status = status
        self.requests: list[bytes] = []
        self.environ: Any = None
        self.start_response: Any = None

    def __call__(self, environ: Any, start_response: Any) -> Any:
        self.environ, self.start_response = environ, start_response
        length = environ.get("CONTENT_LENGTH")
        self.requests.append(environ["wsgi.input"].read(int(length or 0)))
        start_response(self.status, OK[1])
        return self.body


def failing_after(chunk: bytes) -> Any:
    """Returns an app that yields `chunk` and then passes its error to the server."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response(*OK)
        yield chunk
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            start_response("500 Error", OK[1], sys.exc_info())

    return app


class Site:
    """Sends requests with one key to apps behind the middleware."""

    def __init__(self, idem: Idempotency, key: str) -> None:
        self.idem, self.key = idem, key

    def protect(self, app: Any, **options: Any) -> Any:
        return IdempotencyMiddleware(app, self.idem, **{"identity": anonymous, **options})

    def post(self, app: Any, body: bytes = b"", **changes: Any) -> Response:
        """Sends a request, whose environ has these changes; both sides are validated."""
        return request(self.protect(validator(app)), environ(self.key, body, **changes))

    def serve(self, app: Any, start_response: Any = lambda *_: None) -> Any:
        """Returns what a server gets that has not sent the response yet."""
        return self.protect(app)(environ(self.key), start_response)


@pytest.fixture
def site(idem: Idempotency, key: str) -> Site:
    return Site(idem, key)


@pytest.mark.parametrize(
    "untouched",
    [
        environ(None, b"body"),
        *(environ("key", REQUEST_METHOD=m) for m in ("GET", "HEAD", "OPTIONS")),
    ],
    ids=lambda environ: environ["REQUEST_METHOD"],
)
def test_everything_else_is_passed_to_the_app_as_it_is(site: Site, untouched: Any) -> None:
    app, start_response = App(body := Body(b"ok")), Mock()
    stream = untouched["wsgi.input"]

    assert site.protect(app)(untouched, start_response) is body
    assert app.environ is untouched
    assert untouched["wsgi.input"] is stream
    assert app.start_response is start_response


def test_a_chunked_body_is_read_to_its_end(site: Site) -> None:
    app = App()
    chunked = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
    assert site.post(app, b"chunked", CONTENT_LENGTH=None, **chunked).status == 200

    assert app.requests == [b"chunked"]
    assert app.environ["CONTENT_LENGTH"] == "7"
    assert "HTTP_TRANSFER_ENCODING" not in app.environ


@pytest.mark.parametrize(
    ("changes", "status", "problem", "position"),
    [
        # Reading the input of a request without a length would block on some servers.
        *(({"CONTENT_LENGTH": length}, 200, "", 0) for length in (None, "")),
        ({"CONTENT_LENGTH": "4"}, 200, "", 4),
        ({"CONTENT_LENGTH": "9"}, 400, "body-incomplete", 8),
        *(
            ({"CONTENT_LENGTH": length}, 400, "body-incomplete", 0)
            for length in ("x", "-1", "4.0", "٤", "1" * 19)
        ),
        ({"HTTP_TRANSFER_ENCODING": "chunked"}, 411, "length-required", 0),
        ({"wsgi.input_terminated": True}, 413, "body-too-large", 7),
        ({"CONTENT_LENGTH": "7"}, 413, "body-too-large", 0),
    ],
    ids=str,
)
def test_a_body_is_read_as_far_as_its_length_and_the_limit(
    site: Site, changes: dict[str, Any], status: int, problem: str, position: int
) -> None:
    app, stream = App(), BytesIO(b"bodyNEXT")
    values = environ(site.key, **{"CONTENT_LENGTH": None, "wsgi.input": stream, **changes})
    limit = 9 if changes.get("CONTENT_LENGTH") == "9" else 6
    response = request(site.protect(app, max_body_bytes=limit), values, validate=False)

    assert (response.status, stream.tell()) == (status, position)
    assert app.requests == ([b"body"[:position]] if status == 200 else [])
    assert problem.encode() in response.body


def writing(environ: Any, start_response: Any) -> list[bytes]:
    write = start_response(*OK)
    write(b"1")
    write(b"2")
    return [b"3"]


def starting_late(environ: Any, start_response: Any) -> Iterator[bytes]:
    start_response(*OK)
    yield b"12"
    yield b"3"


def sending_a_file(environ: Any, start_response: Any) -> Any:
    start_response(*OK)
    return FileWrapper(BytesIO(b"123"))


class TestResponse:
    @pytest.mark.parametrize("app", [writing, starting_late, sending_a_file])
    def test_it_is_stored_however_it_is_sent(self, site: Site, app: Any) -> None:
        assert [site.post(app).body for _ in range(2)] == [b"123"] * 2

    def test_the_body_is_closed_once_after_it_was_sent(self, site: Site) -> None:
        body = Body(b"1", b"2")
        chunks = site.serve(App(body))
        assert (list(chunks), body.closed) == ([b"12"], 0)
        chunks.close()
        assert body.closed == 1

    def test_the_reason_of_a_status_is_replayed(self, site: Site) -> None:
        app = App(status="299 Half Done")
        assert [site.post(app).status_line for _ in range(2)] == ["299 Half Done"] * 2

    def test_a_large_response_is_streamed_and_closed(self, site: Site) -> None:
        body = Body(b"x" * (MAX_BYTES + 1), b"y", b"z")
        chunks = site.serve(App(body))

        (record,) = site.idem.records()
        assert record.state.value == "COMPLETED"
        iterator = iter(chunks)
        assert len(next(iterator)) == MAX_BYTES + 1
        assert next(body.chunks) == b"y"  # not taken yet
        assert (next(iterator), body.closed) == (b"z", 0)
        chunks.close()
        assert body.closed == 1
        assert site.post(App()).status == 409

    def test_a_released_key_is_free_before_the_response_is_sent(self, site: Site) -> None:
        """A client that retries at once does not meet its own first request."""
        records: list[Any] = []
        app = App(status="429 Too Many Requests")
        site.serve(app, lambda *_: records.append(list(site.idem.records())))
        assert records == [[]]


class TestErrors:
    def test_a_body_that_fails_is_closed_and_its_key_is_free(self, site: Site) -> None:
        body = Body(b"1", error=ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            site.post(App(body))
        assert body.closed == 1
        assert list(site.idem.records()) == []

    def test_exc_info_replaces_a_response_of_which_nothing_was_sent(self, site: Site) -> None:
        def app(environ: Any, start_response: Any) -> list[bytes]:
            start_response(*OK)
            try:
                raise ZeroDivisionError
            except ZeroDivisionError:
                start_response("422 Unprocessable Content", OK[1], sys.exc_info())
            return [b"sorry"]

        for _ in range(2):
            response = site.post(app)
            assert (response.status, response.body) == (422, b"sorry")

    def test_exc_info_is_raised_once_a_part_was_sent(self, site: Site) -> None:
        with pytest.raises(ZeroDivisionError):
            site.post(failing_after(b"1"))
        assert list(site.idem.records()) == []

    def test_exc_info_of_a_large_response_goes_to_the_server(self, site: Site) -> None:
        with pytest.raises(ZeroDivisionError):
            site.post(failing_after(b"x" * (MAX_BYTES + 1)))

    @pytest.mark.parametrize("calls", [0, 2])
    def test_start_response_is_called_once(self, site: Site, calls: int) -> None:
        def app(environ: Any, start_response: Any) -> list[bytes]:
            for _ in range(calls):
                start_response(*OK)
            return [b"ok"]

        with pytest.raises(RuntimeError, match="start_response"):
            request(site.protect(app), environ(site.key))
        assert list(site.idem.records()) == []


def test_two_services_on_one_redis_do_not_answer_for_each_other(site: Site) -> None:
    """Each has an engine, and gets the same request of one user."""
    for name in ("billing", "shipping"):
        options = {"key_prefix": site.key, "name": name}
        site.idem = Idempotency(site.idem.settings.redis_url, **options)
        assert site.post(App(name.encode())).body == name.encode()
        site.idem.close()
