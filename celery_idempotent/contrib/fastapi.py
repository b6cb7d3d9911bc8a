"""A decorator for one endpoint of FastAPI or Starlette; see docs/http.md.

The key is looked up after the request has been validated and its dependencies have run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Annotated, Any, NamedTuple

import anyio.from_thread
from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Route

from celery_idempotent.contrib.asgi import decoded, encoded
from celery_idempotent.contrib.http.identity import anonymous, by_cookie, by_header
from celery_idempotent.contrib.http.response import Headers, stored_by_default
from celery_idempotent.contrib.http.response import Response as Captured
from celery_idempotent.contrib.http.route import BaseRoute, EndpointCall
from celery_idempotent.core.store import run_sync
from celery_idempotent.functions.engine import Idempotency

__all__ = ["anonymous", "by_cookie", "by_header", "idempotent_route", "stored_by_default"]

logger = logging.getLogger(__name__)

#: The parameter added to an endpoint.
_PARAMETER = "idempotency_exchange"
#: The options of a FastAPI route that concern its responses.
_RESPONSE_OPTIONS = (
    *("response_model", "response_class", "status_code"),
    *(f"response_model_{name}" for name in ("include", "exclude", "by_alias")),
    *(f"response_model_exclude_{name}" for name in ("unset", "defaults", "none")),
)
#: The scope entry that holds the return value of an endpoint.
_RETURNED = "celery_idempotent.returned"


class _Injected(NamedTuple):
    request: Request
    #: Collects the headers, cookies and status that the endpoint and its dependencies set.
    response: Response


def _inject(request: Request, response: Response) -> _Injected:
    return _Injected(request, response)


@dataclass(frozen=True)
class _FastApiCall(EndpointCall):
    collected: Response


class _Route(BaseRoute):
    _route_classes = (Route,)

    def __init__(self, endpoint: Callable[..., Any], idem: Idempotency, **options: Any) -> None:
        super().__init__(endpoint, idem, **options)
        # Unwrapped as FastAPI does with the decorated endpoint, to decide whether to use a thread.
        self._is_async = inspect.iscoroutinefunction(inspect.unwrap(endpoint))
        #: Whether the endpoint was called without a request, which is logged once.
        self._was_direct = False
        #: By the id of a route: the route, so that no other object gets its id, and the function
        #: that makes its responses.
        self._renderers: dict[int, tuple[APIRoute, Callable[[Request], Any]]] = {}

    @classmethod
    def _endpoints_in(cls, holder: Any) -> Iterable[Any]:
        return (holder.endpoint,)

    def decorated(self) -> Any:
        # FastAPI calls a coroutine function in the event loop, and any other function in a thread.

        @wraps(self._app)
        async def run(*args: Any, **kwargs: Any) -> Any:
            return await self._handle(args, kwargs)

        @wraps(self._app)
        def run_in_thread(*args: Any, **kwargs: Any) -> Any:
            return run_sync(self._handle(args, kwargs))

        decorated: Any = run if self._is_async else run_in_thread
        decorated.__signature__ = self._with_injected()
        return decorated

    def _with_injected(self) -> inspect.Signature:
        """Returns the endpoint's signature, with a parameter that FastAPI injects."""
        try:  # FastAPI may look up annotations in the globals of the decorated function
            signature = inspect.signature(self._app, eval_str=True)
        except NameError:  # a name that only type checkers import
            signature = self._signature
        added = inspect.Parameter(
            _PARAMETER,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[_Injected, Depends(_inject)],
        )
        parameters = sorted([*signature.parameters.values(), added], key=lambda p: p.kind)
        return signature.replace(parameters=parameters)

    async def _handle(self, args: Any, kwargs: Any) -> Any:
        injected = _injected(args, kwargs)
        endpoint = partial(self._app, *args, **kwargs)
        if injected is None:
            if not self._was_direct:
                self._was_direct = True
                logger.warning(
                    "%s was called without a request, and is unprotected: if a route calls it, "
                    "decorators between them must keep its signature, as functools.wraps does",
                    self._name,
                )
            return await self._finished(endpoint())
        request, collected = injected
        arguments = self._arguments(args, kwargs)
        call = _FastApiCall(request, arguments, request.scope, endpoint, collected)
        return await self._respond(call, request.method)

    async def _await(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._is_async:
            return await function(*args)
        return anyio.from_thread.run(function, *args)

    def _methods_of(self, call: EndpointCall) -> Collection[str] | None:
        return getattr(call.request.scope.get("route"), "methods", None)

    def _route_of(self, call: EndpointCall) -> tuple[str, ...]:
        scope = call.request.scope
        path, route = scope["path"], scope.get("route")
        if isinstance(route, Route):
            # The template of an included router's route lacks the router's prefix, so it matches
            # only the end of the path. The prefix is taken from the request.
            starts = [index for index, character in enumerate(path) if character == "/"]
            for start in reversed(starts):
                if route.path_regex.match(path[start:]):
                    path = path[:start] + route.path
                    break
        # Routes of two hosts may be equal, but not the classes of their endpoints.
        endpoint = getattr(scope.get("endpoint"), "__qualname__", "")
        return call.request.method.upper(), scope.get("root_path", ""), path, endpoint

    async def _body(self, call: EndpointCall) -> Any:
        try:
            return await self._await(call.request.body)
        except RuntimeError:  # Starlette reads a form without keeping its bytes
            raise TypeError(
                f"{self._title}: the body of {self._name} cannot be read, since its "
                "form was parsed; pass fingerprint="
            ) from None

    def _captured(self, response: Response) -> Captured:
        body = getattr(response, "body", None)  # streams and files have none
        headers = decoded(response.raw_headers)
        return Captured(response.status_code, headers, None if body is None else bytes(body))

    async def _rendered(self, call: _FastApiCall, value: Any) -> Any:
        """Returns the response that FastAPI makes of the endpoint's `value`, by a second route.

        That route has the response options of the first, and returns `value` instead of calling the
        endpoint.
        """
        if isinstance(value, Response):
            return value
        route: APIRoute = call.request.scope["route"]
        if id(route) not in self._renderers:
            options = {name: getattr(route, name) for name in _RESPONSE_OPTIONS}
            handler = APIRoute("/", _returned, **options).get_route_handler()
            self._renderers[id(route)] = route, handler
        _, handler = self._renderers[id(route)]
        scope = {**call.request.scope, _RETURNED: (value, call.collected)}
        return await self._await(handler, Request(scope))

    async def _error_response(self, call: EndpointCall, error: Exception) -> Any:
        """Returns the response of the app's handler for `error`; raises `error` if it has none."""
        default = ExceptionMiddleware(self._app).http_exception
        handlers = {HTTPException: default, **call.request.app.exception_handlers}
        kinds: list[Any] = [error.status_code] if isinstance(error, HTTPException) else []
        kinds += [kind for kind in type(error).__mro__ if kind is not Exception]
        handler = next((handlers[kind] for kind in kinds if kind in handlers), None)
        if handler is None:
            raise error
        if not inspect.iscoroutinefunction(handler):
            handler = partial(run_in_threadpool, handler)
        return await self._await(handler, call.request, error)

    def _add(self, response: Response, headers: Headers) -> None:
        response.raw_headers.extend(encoded(headers))

    def _converted(self, response: Captured) -> Response:
        converted = Response(response.body, response.status)
        converted.raw_headers = encoded(response.headers)
        return converted


def _injected(args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns FastAPI's injected value; Starlette passes the request as an argument."""
    request = next((argument for argument in args if isinstance(argument, Request)), None)
    default = None if request is None else _Injected(request, Response())
    return kwargs.pop(_PARAMETER, default)


def _returned(request: Request, response: Response) -> Any:
    """Endpoint that returns the return value of the decorated one."""
    value, collected = request.scope[_RETURNED]
    response.raw_headers.extend(collected.raw_headers)
    response.status_code = collected.status_code
    return value


idempotent_route = _Route.decorator
