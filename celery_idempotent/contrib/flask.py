"""A decorator for one view of Flask; see docs/http.md."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial, wraps
from inspect import getclosurevars
from typing import Any

import flask

from celery_idempotent.contrib.http.identity import anonymous, by_cookie, by_header
from celery_idempotent.contrib.http.response import Headers, stored_by_default
from celery_idempotent.contrib.http.response import Response as Captured
from celery_idempotent.contrib.http.route import BaseRoute, EndpointCall
from celery_idempotent.contrib.wsgi import WsgiReader
from celery_idempotent.core.store import run_sync

__all__ = ["anonymous", "by_cookie", "by_header", "idempotent_route", "stored_by_default"]


class _Route(BaseRoute, WsgiReader):
    _route_classes = (flask.Flask, flask.Blueprint)

    @classmethod
    def _endpoints_in(cls, holder: Any) -> Iterable[Any]:
        if isinstance(holder, flask.Flask):
            return holder.view_functions.values()
        # A blueprint has functions that add its routes to an app later; each closes over its view.
        added = [getclosurevars(add).nonlocals for add in holder.deferred_functions]
        return [variables.get("view_func") for variables in added]

    def decorated(self) -> Any:
        @wraps(self._app)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not flask.has_request_context():
                return self._app(*args, **kwargs)
            request = flask.request
            view = partial(flask.current_app.ensure_sync(self._app), *args, **kwargs)
            call = EndpointCall(request, self._arguments(args, kwargs), request.environ, view)
            return run_sync(self._respond(call, request.method))

        return run

    def _methods_of(self, call: EndpointCall) -> Collection[str] | None:
        rule = call.request.url_rule
        return None if rule is None else rule.methods

    def _route_of(self, call: EndpointCall) -> tuple[str, ...]:
        request: flask.Request = call.request
        # Rules of two subdomains may be equal, but not the names of their endpoints.
        return (
            request.method.upper(),
            request.root_path,
            str(request.url_rule),
            f"{request.endpoint}",
        )

    async def _body(self, call: EndpointCall) -> bytes:
        request: flask.Request = call.request
        if "stream" not in vars(request):
            return self._read_body(request.environ)
        if "form" in vars(request) and (request.form or request.files):
            raise TypeError(
                f"{self._title}: the body of {self._name} cannot be read, since its "
                "form was parsed; pass fingerprint="
            )
        return request.get_data()  # a hook has read the body

    async def _rendered(self, call: EndpointCall, value: Any) -> flask.Response:
        return flask.make_response(value)

    async def _error_response(self, call: EndpointCall, error: Exception) -> flask.Response:
        response = flask.make_response(flask.current_app.handle_user_exception(error))
        response.make_sequence()  # an abort() response is a WSGI app, which would be streamed
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


idempotent_route = _Route.decorator
