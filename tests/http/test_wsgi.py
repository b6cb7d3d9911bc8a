"""The middleware as a WSGI app: how it reads, calls the app and sends (PEP 3333)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from io import BytesIO
from typing import Any
from wsgiref.util import FileWrapper
from wsgiref.validate import validator

import pytest

from celery_idempotent import Idempotency
from celery_idempotent.contrib.wsgi import IdempotencyMiddleware, anonymous
from tests.http.drivers.web_server import MAX_BYTES
from tests.http.drivers.wsgi import environ, request

OK = ("200 OK", [("Content-Type", "text/plain")])


class Body:
    """An iterable that counts how often it is closed."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks = iter(chunks)
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        return self.chunks

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


def protect(app: Any, idem: Idempotency, **options: Any) -> Any:
    return IdempotencyMiddleware(validator(app), idem, **{"identity": anonymous, **options})


@pytest.mark.parametrize(
    "untouched",
    [
        environ(None, b"body"),
        *(environ("key", REQUEST_METHOD=m) for m in ("GET", "HEAD", "OPTIONS")),
    ],
    ids=lambda environ: environ["REQUEST_METHOD"],
)
def test_everything_else_is_passed_to_the_app_as_it_is(idem: Idempotency, untouched: Any) -> None:
    app = App()
    body, stream = Body(b"ok"), untouched["wsgi.input"]
    app.body = body

    def start_response(*args: Any) -> Any:
        return None

    middleware = IdempotencyMiddleware(app, idem, identity=anonymous)
    assert middleware(untouched, start_response) is body
    assert app.environ is untouched
    assert untouched["wsgi.input"] is stream
    assert app.start_response is start_response


class TestBody:
    def test_a_chunked_body_is_read_to_its_end(self, idem: Idempotency, key: str) -> None:
        app = App()
        chunked = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
        values = environ(key, b"chunked", CONTENT_LENGTH=None, **chunked)
        assert request(protect(app, idem), values).status == 200

        assert app.requests == [b"chunked"]
        assert app.environ["CONTENT_LENGTH"] == "7"
        assert "HTTP_TRANSFER_ENCODING" not in app.environ

    def test_a_chunked_body_without_an_end_is_refused(self, idem: Idempotency, key: str) -> None:
        app = App()
        values = environ(key, b"x", CONTENT_LENGTH=None, HTTP_TRANSFER_ENCODING="chunked")
        response = request(protect(app, idem), values)

        assert (response.status, app.requests) == (411, [])
        assert b"length-required" in response.body

    @pytest.mark.parametrize("length", [None, ""])
    def test_without_a_length_there_is_no_body(
        self, idem: Idempotency, key: str, length: Any
    ) -> None:
        """Reading the input of such a request would block on some servers."""
        app = App()
        values = environ(key, b"never read", CONTENT_LENGTH=length)
        assert request(protect(app, idem), values, validate=False).status == 200
        assert app.requests == [b""]

    @pytest.mark.parametrize("length", ["7", "x", "-1", "4.0", "٤", "1" * 19])
    def test_a_length_that_is_wrong_is_refused(
        self, idem: Idempotency, key: str, length: str
    ) -> None:
        app = App()
        values = environ(key, b"body", CONTENT_LENGTH=length)
        response = request(protect(app, idem), values, validate=False)

        assert (response.status, app.requests) == (400, [])
        assert b"body-incomplete" in response.body

    def test_no_more_is_read_than_the_length(self, idem: Idempotency, key: str) -> None:
        stream = BytesIO(b"bodyNEXT REQUEST")
        app = App()
        values = environ(key, CONTENT_LENGTH="4", **{"wsgi.input": stream})
        request(protect(app, idem), values)

        assert app.requests == [b"body"]
        assert stream.read() == b"NEXT REQUEST"

    def test_a_large_chunked_body_is_not_read_to_its_end(self, idem: Idempotency, key: str) -> None:
        stream = BytesIO(b"x" * 3000)
        values = environ(
            key, CONTENT_LENGTH=None, **{"wsgi.input": stream, "wsgi.input_terminated": True}
        )
        assert request(protect(App(), idem, max_body_bytes=1000), values).status == 413
        assert stream.tell() == 1001

    def test_a_declared_length_above_the_limit_is_refused_without_reading(
        self, idem: Idempotency, key: str
    ) -> None:
        stream = BytesIO(b"x" * 3000)
        values = environ(key, CONTENT_LENGTH="3000", **{"wsgi.input": stream})
        assert request(protect(App(), idem, max_body_bytes=1000), values).status == 413
        assert stream.tell() == 0


class TestResponse:
    def test_write_is_a_part_of_the_body(self, idem: Idempotency, key: str) -> None:
        def app(environ: Any, start_response: Any) -> list[bytes]:
            write = start_response(*OK)
            write(b"1")
            write(b"2")
            return [b"3"]

        for _ in range(2):
            assert request(protect(app, idem), environ(key)).body == b"123"

    def test_the_body_is_closed_once_after_it_was_sent(self, idem: Idempotency, key: str) -> None:
        body = Body(b"1", b"2")
        chunks = IdempotencyMiddleware(App(body), idem, identity=anonymous)(
            environ(key), lambda *_: None
        )
        assert (list(chunks), body.closed) == ([b"12"], 0)
        chunks.close()  # type: ignore[attr-defined]
        assert body.closed == 1

    def test_a_generator_starts_its_response_late(self, idem: Idempotency, key: str) -> None:
        def app(environ: Any, start_response: Any) -> Iterator[bytes]:
            start_response(*OK)
            yield b"1"
            yield b"2"

        assert [request(protect(app, idem), environ(key)).body for _ in range(2)] == [b"12"] * 2

    def test_a_file_is_read(self, idem: Idempotency, key: str) -> None:
        for _ in range(2):
            app = App(FileWrapper(BytesIO(b"file")))
            assert request(protect(app, idem), environ(key)).body == b"file"

    def test_the_reason_of_a_status_is_replayed(self, idem: Idempotency, key: str) -> None:
        app = App(status="299 Half Done")
        lines = [request(protect(app, idem), environ(key)).status_line for _ in range(2)]
        assert lines == ["299 Half Done"] * 2

    def test_a_large_response_is_streamed_and_closed(self, idem: Idempotency, key: str) -> None:
        body = Body(b"x" * (MAX_BYTES + 1), b"y", b"z")
        chunks = IdempotencyMiddleware(App(body), idem, identity=anonymous)(
            environ(key), lambda *_: None
        )

        (record,) = idem.records()
        assert record.state.value == "COMPLETED"
        iterator = iter(chunks)
        assert len(next(iterator)) == MAX_BYTES + 1
        assert next(body.chunks) == b"y"  # not taken yet
        assert (next(iterator), body.closed) == (b"z", 0)
        chunks.close()  # type: ignore[attr-defined]
        assert body.closed == 1
        assert request(protect(App(), idem), environ(key)).status == 409

    def test_a_released_key_is_free_before_the_response_is_sent(
        self, idem: Idempotency, key: str
    ) -> None:
        """A client that retries at once does not meet its own first request."""
        records: list[Any] = []
        app = App(status="429 Too Many Requests")
        middleware = IdempotencyMiddleware(app, idem, identity=anonymous)
        middleware(environ(key), lambda *_: records.append(list(idem.records())))
        assert records == [[]]


class TestErrors:
    def test_a_body_that_fails_is_closed_and_its_key_is_free(
        self, idem: Idempotency, key: str
    ) -> None:
        def failing() -> Iterator[bytes]:
            try:
                yield b"1"
                raise ZeroDivisionError
            finally:
                closed.append(True)

        closed: list[bool] = []
        with pytest.raises(ZeroDivisionError):
            request(protect(App(failing()), idem), environ(key))
        assert closed == [True]
        assert list(idem.records()) == []

    def test_exc_info_replaces_a_response_of_which_nothing_was_sent(
        self, idem: Idempotency, key: str
    ) -> None:
        def app(environ: Any, start_response: Any) -> list[bytes]:
            start_response(*OK)
            try:
                raise ZeroDivisionError
            except ZeroDivisionError:
                start_response("422 Unprocessable Content", OK[1], sys.exc_info())
            return [b"sorry"]

        for _ in range(2):
            response = request(protect(app, idem), environ(key))
            assert (response.status, response.body) == (422, b"sorry")

    def test_exc_info_is_raised_once_a_part_was_sent(self, idem: Idempotency, key: str) -> None:
        with pytest.raises(ZeroDivisionError):
            request(protect(failing_after(b"1"), idem), environ(key))
        assert list(idem.records()) == []

    def test_exc_info_of_a_large_response_goes_to_the_server(
        self, idem: Idempotency, key: str
    ) -> None:
        with pytest.raises(ZeroDivisionError):
            request(protect(failing_after(b"x" * (MAX_BYTES + 1)), idem), environ(key))

    @pytest.mark.parametrize("calls", [0, 2])
    def test_start_response_is_called_once(self, idem: Idempotency, key: str, calls: int) -> None:
        def app(environ: Any, start_response: Any) -> list[bytes]:
            for _ in range(calls):
                start_response(*OK)
            return [b"ok"]

        middleware = IdempotencyMiddleware(app, idem, identity=anonymous)
        with pytest.raises(RuntimeError, match="start_response"):
            request(middleware, environ(key))
        assert list(idem.records()) == []


def test_two_apps_under_different_prefixes_never_answer_for_each_other(
    idem: Idempotency, key: str
) -> None:
    responses = [
        request(protect(App(name.encode()), idem), environ(key, SCRIPT_NAME=name))
        for name in ("/a", "/b", "/a")
    ]
    assert [response.status for response in responses] == [200, 422, 200]
    assert responses[2].body == b"/a"
