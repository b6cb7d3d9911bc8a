"""The base of `idempotent_route`, the decorators of single endpoints in FastAPI and Flask.

A subclass adapts a framework: it reads the body of a request, and turns an endpoint's return value
into a response. Its coroutines do not suspend if the endpoint blocks.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from celery_idempotent.contrib.http.middleware import Answered, BaseMiddleware, Exchange
from celery_idempotent.contrib.http.request import fingerprint as fingerprint_of
from celery_idempotent.contrib.http.request import target_of
from celery_idempotent.contrib.http.response import Headers, Response
from celery_idempotent.errors import SettingsError
from celery_idempotent.functions.direct_call import current_execution
from celery_idempotent.functions.engine import Idempotency

#: By default all methods that may have an effect, since the decorator selects a single endpoint.
METHODS = ("POST", "PUT", "PATCH", "DELETE")

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def _references_to(function: Callable[..., Any]) -> int:
    return sys.getrefcount(function)


@_references_to
def _NEW_FUNCTION() -> None:  # noqa: N802
    """Replaced by a number: how many references exist to a function that is just being decorated.

    If there are more, a route or another decorator may refer to it.
    """


def _with_subclasses(classes: Iterable[type]) -> Iterator[type]:
    for each in classes:
        yield each
        yield from _with_subclasses(each.__subclasses__())


@dataclass(frozen=True)
class EndpointCall:
    """A request that has reached its endpoint, for the functions of `BaseMiddleware`."""

    #: The framework's request.
    request: Any
    #: The endpoint's arguments, by name.
    arguments: Mapping[str, Any]
    #: The ASGI scope or WSGI environ, under Django's name for it.
    META: Any
    #: Calls the endpoint.
    run: Callable[[], Any]


class BaseRoute(BaseMiddleware):
    """Runs an endpoint once for a key, as :class:`BaseMiddleware` runs an app."""

    _title = "idempotent_route"
    #: The framework's classes whose instances refer to endpoints, such as its routes.
    _route_classes: ClassVar[tuple[type, ...]]

    @classmethod
    def decorator(
        cls,
        idem: Idempotency,
        *,
        identity: Callable[..., str | None],
        key: Callable[..., str | None] | None = None,
        fingerprint: Callable[..., Any] | None = None,
        methods: Collection[str] = METHODS,
        **options: Any,
    ) -> Callable[[Endpoint], Endpoint]:
        """Runs an endpoint once for a key, and replays its response to retries.

        Place it below the decorators that add the route and check permissions; above the route, it
        is refused. All functions among the options, except `store_response`, get the framework's
        request, and any of the endpoint's arguments that they name as further parameters. Outside a
        request, as in a test, the endpoint runs undecorated.

        Args:
            idem: the engine that stores the responses, with a name unique to this service.
            identity: returns the text that identifies the sender, or None if it is unknown.
            key: returns the key as text, or None if the request needs none; by default, the
                Idempotency-Key header.
            fingerprint: returns a value that must be equal in all requests with one key, as their
                method and path; by default, the whole request. Required if the framework reads a
                form.
            methods: the HTTP methods to which keys apply.
            options: the other options of `IdempotencyMiddleware`.

        Raises:
            SettingsError: for the first invalid option, in one line.
        """
        options |= {"identity": identity, "methods": methods}

        def decorate(endpoint: Endpoint) -> Endpoint:
            if hasattr(endpoint, "__wrapped__") or sys.getrefcount(endpoint) > _NEW_FUNCTION:
                cls._refuse_routed(endpoint)
            route = cls(endpoint, idem, key=key, fingerprint=fingerprint, **options)
            return route.decorated()  # type: ignore[no-any-return]

        return decorate

    @classmethod
    def _refuse_routed(cls, endpoint: Any) -> None:
        """Refuses an endpoint that has a route, which calls it without the decorator."""
        functions = [endpoint]
        while (wrapped := getattr(functions[-1], "__wrapped__", None)) is not None:
            functions.append(wrapped)
        # No framework has a list of all its routes, but each object refers to its class. A list of
        # all objects (``gc.get_objects``) would also have those that other threads are creating.
        for each in gc.get_referrers(*_with_subclasses(cls._route_classes)):
            if not issubclass(type(each), cls._route_classes):
                continue
            for routed in cls._endpoints_in(each):
                if any(routed is function for function in functions):
                    raise SettingsError(
                        f"{cls._title}: a route calls {routed.__qualname__} unprotected; put "
                        f"@{cls._title} below the decorator that adds the route"
                    )

    @classmethod
    def _endpoints_in(cls, holder: Any) -> Iterable[Any]:
        """Returns the endpoints that an instance of `_route_classes` refers to."""
        raise NotImplementedError

    def __init__(
        self,
        endpoint: Callable[..., Any],
        idem: Idempotency,
        *,
        key: Callable[..., str | None] | None,
        fingerprint: Callable[..., Any] | None,
        **options: Any,
    ) -> None:
        if not hasattr(endpoint, "__qualname__"):
            raise SettingsError(
                f"{self._title}: a {type(endpoint).__name__} has no name; decorate a function"
            )
        if inspect.isclass(endpoint):
            raise SettingsError(
                f"{self._title}: {endpoint.__qualname__} is a class; decorate its methods"
            )
        if inspect.isgeneratorfunction(endpoint) or inspect.isasyncgenfunction(endpoint):
            raise SettingsError(
                f"{self._title}: {endpoint.__qualname__} yields its response, which cannot be held "
                "back; return a streaming response"
            )
        self._signature = inspect.signature(endpoint)
        for name in ("identity", "required", "authorize_replay"):
            if callable(options.get(name)):
                options[name] = self._of_call(name, options[name])
        super().__init__(endpoint, idem, **options)
        self._key = None if key is None else self._of_call("key", key)
        self._fingerprint = (
            None if fingerprint is None else self._of_call("fingerprint", fingerprint)
        )
        self._name = f"{endpoint.__module__}.{endpoint.__qualname__}"

    def _of_call(self, option: str, function: Callable[..., Any]) -> Callable[[EndpointCall], Any]:
        """Returns a function of a call, which passes `function` the arguments it wants."""
        self._check(callable(function), option, "a function of the request", function)
        known = self._signature.parameters
        _, *wanted = inspect.signature(function).parameters.values()
        for parameter in wanted:
            if parameter.name not in known and parameter.default is parameter.empty:
                raise SettingsError(
                    f"{self._title}: {option} has a parameter {parameter.name}, which the endpoint "
                    f"does not have; it has {', '.join(known) or 'none'}"
                )
        names = [parameter.name for parameter in wanted if parameter.name in known]

        def of_call(call: EndpointCall) -> Any:
            return function(
                call.request, **{n: call.arguments[n] for n in names if n in call.arguments}
            )

        return of_call

    def decorated(self) -> Any:
        """Returns the function that takes the endpoint's place."""
        raise NotImplementedError

    async def _respond(self, call: EndpointCall, method: str) -> Any:
        """Returns the endpoint's response, or a stored one."""
        if not self._settings.enabled:
            return await self._finished(call.run())
        if method.upper() not in self._methods:
            routed = self._methods_of(call)
            if routed and self._methods.isdisjoint(routed):
                raise SettingsError(
                    f"{self._title}: {self._name} is unprotected, since its route has none of the "
                    f"methods {', '.join(sorted(self._methods))}; pass its own as methods="
                )
            return await self._finished(call.run())
        async with Exchange() as exchange:
            try:
                admitted = self._admit(call)
                if admitted is None or self._is_running(admitted):
                    return await self._finished(call.run())
                await self._begin(exchange, call, admitted, await self._fingerprint_of(call))
                try:
                    response = await self._rendered(call, await self._finished(call.run()))
                except Exception as error:
                    response = await self._error_response(call, error)
                    await self._settle(exchange, call, self._captured(response))
                    raise
                added = await self._settle(exchange, call, self._captured(response))
            except Answered as answered:
                return self._converted(answered.response)
            self._add(response, added)
            return response

    def _admit(self, request: EndpointCall) -> tuple[str, ...] | None:
        admitted = super()._admit(request)
        # A client chooses the key of a header for one operation. Key functions of two endpoints may
        # return the same number, so their keys also have the endpoint.
        if admitted is None or self._key is None:
            return admitted
        return *admitted, self._name, *self._route_of(request)

    def _key_fields(self, request: EndpointCall) -> list[str]:
        if self._key is None:
            return super()._key_fields(request)
        key = self._key(request)
        if not isinstance(key, (str, type(None))):
            raise TypeError(f"key must return text or None, not {type(key).__name__}")
        return [] if key is None else ['"' + re.sub(r'(["\\])', r"\\\1", key) + '"']

    def _is_running(self, admitted: tuple[str, ...]) -> bool:
        """Returns whether the middleware around the app has begun an execution with this key."""
        outer = current_execution.get()
        return outer is not None and outer.key == str(self._idem.key_of(admitted))

    async def _fingerprint_of(self, call: EndpointCall) -> Any:
        declared = self._declared_length(call)
        if self._fingerprint is not None:
            return [*target_of(call), self._fingerprint(call)]
        body = await self._body(call)
        self._check_length(len(body), declared)
        return fingerprint_of(call, body)

    def _arguments(self, args: Any, kwargs: Any) -> Mapping[str, Any]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _methods_of(self, call: Any) -> Collection[str] | None:
        """Returns the methods of the route; None if they are unknown."""
        raise NotImplementedError

    def _route_of(self, call: Any) -> tuple[str, ...]:
        """Returns what distinguishes the routes of endpoints with the same name.

        A factory or a base class makes such endpoints. It is the method, the template of the path,
        and so on.
        """
        raise NotImplementedError

    async def _body(self, call: EndpointCall) -> Any:
        raise NotImplementedError

    async def _rendered(self, call: Any, value: Any) -> Any:
        """Returns the framework's response for the endpoint's return value."""
        raise NotImplementedError

    async def _error_response(self, call: EndpointCall, error: Exception) -> Any:
        """Returns the framework's response to an error of the endpoint, or raises the error."""
        raise NotImplementedError

    def _captured(self, response: Any) -> Response:
        raise NotImplementedError

    def _add(self, response: Any, headers: Headers) -> None:
        raise NotImplementedError

    def _converted(self, response: Response) -> Any:
        raise NotImplementedError
