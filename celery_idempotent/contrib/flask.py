"""A decorator for one view of Flask; see docs/http.md."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial, wraps
from typing import Any, TypeVar

import flask

from celery_idempotent.contrib.http.identity import anonymous, by_cookie, by_header
from celery_idempotent.contrib.http.response import Headers, stored_by_default
from celery_idempotent.contrib.http.response import Response as Captured
from celery_idempotent.contrib.http.route import METHODS, BaseRoute, Call
from celery_idempotent.contrib.wsgi import WsgiReader
from celery_idempotent.functions.engine import Idempotency
from celery_idempotent.store.run_sync import run_sync

__all__ = ["anonymous", "by_cookie", "by_header", "idempotent_route", "stored_by_default"]

View = TypeVar("View", bound=Callable[..., Any])


def idempotent_route(
    idem: Idempotency,
    *,
    identity: Callable[..., str | None],
    key: Callable[..., str | None] | None = None,
    fingerprint: Callable[..., Any] | None = None,
    methods: Collection[str] = METHODS,
    **options: Any,
) -> Callable[[View], View]:
    """Runs a view once for a key, and replays its response to retries.

    Place it below the decorators that add the route and check permissions. Option functions get
    Flask's request and any of the view's arguments that they name as further parameters. Outside a
    request, the view runs as if undecorated.

    Args:
        idem: the engine that stores the responses, with a name unique to this service.
        identity: returns the text that identifies the sender, or None if it is unknown.
        key: returns the key as text, or None if the request needs none; by default, the
            Idempotency-Key header.
        fingerprint: returns a value that must be equal in all requests with one key; by default,
            the whole request.
        methods: the HTTP methods to which keys apply.
        options: the other options of `celery_idempotent.contrib.wsgi.IdempotencyMiddleware`.

    Raises:
        SettingsError: for the first invalid option, in one line.
    """
    options |= {"identity": identity, "key": key, "fingerprint": fingerprint, "methods": methods}

    def decorate(view: View) -> View:
        route = _Route(view, idem, **options)

        @wraps(view)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not flask.has_request_context():
                return view(*args, **kwargs)
            return route.respond_to(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


class _Route(BaseRoute, WsgiReader):
    def respond_to(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the response to the current request."""
        request = flask.request
        view = partial(flask.current_app.ensure_sync(self._app), *args, **kwargs)
        call = Call(request, self._arguments(args, kwargs), request.environ, view)
        return run_sync(self._respond(call, request.method))

    async def _body(self, call: Call) -> bytes:
        request: flask.Request = call.request
        if "stream" not in vars(request):
            return self._read_body(request.environ)
        if "form" in vars(request) and (request.form or request.files):
            raise TypeError(
                f"{self._title}: the form of {self._name} was read before; pass fingerprint="
            )
        return request.get_data()  # a hook has read the body

    async def _rendered(self, call: Call, value: Any) -> flask.Response:
        return flask.make_response(value)

    async def _error_response(self, call: Call, error: Exception) -> flask.Response:
        response = flask.make_response(flask.current_app.handle_user_exception(error))
        response.make_sequence()  # Werkzeug would stream that of an abort(), a WSGI app
        return response

    def _captured(self, response: flask.Response) -> Captured:
        is_whole = not (response.is_streamed or response.direct_passthrough)
        body = response.get_data() if is_whole else None
        _, _, reason = response.status.partition(" ")
        return Captured(response.status_code, list(response.headers), body, reason)

    def _add(self, response: flask.Response, headers: Headers) -> None:
        response.headers.extend(headers)

    def _converted(self, response: Captured) -> flask.Response:
        status = f"{response.status} {response.reason}" if response.reason else response.status
        return flask.Response(response.body, status, response.headers)
