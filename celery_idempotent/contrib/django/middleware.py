"""Idempotency-Key middleware for Django, under WSGI and ASGI; see docs/http.md.

Place it below AuthenticationMiddleware and CsrfViewMiddleware in ``MIDDLEWARE``. The key is checked
after the CSRF token and before the view, so a request that no view handles, or with a wrong token,
leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from inspect import signature
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured, RequestDataTooBig
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest, HttpResponse, UnreadablePostError
from django.http.response import HttpResponseBase
from django.utils.module_loading import import_string

from celery_idempotent.contrib.http.identity import anonymous, by_cookie, by_header
from celery_idempotent.contrib.http.middleware import (
    MAX_BODY_BYTES,
    Answered,
    BaseMiddleware,
    Exchange,
)
from celery_idempotent.contrib.http.problem import Problem
from celery_idempotent.contrib.http.request import KEY_HEADER, fields_of, fingerprint
from celery_idempotent.contrib.http.response import Response, stored_by_default
from celery_idempotent.core.printable import did_you_mean
from celery_idempotent.core.store import run_sync
from celery_idempotent.errors import SettingsError

__all__ = [
    "IdempotencyMiddleware",
    "anonymous",
    "by_cookie",
    "by_header",
    "by_user",
    "stored_by_default",
]

#: The setting of Django projects that has the options.
SETTING = "IDEMPOTENCY_MIDDLEWARE"

#: Each option with the middleware argument that it sets.
OPTIONS = {
    "ENGINE" if name == "idem" else name.upper(): name
    for name in signature(BaseMiddleware).parameters
    if name != "app"
}
#: Options that may be dotted paths of objects.
_PATHS = ("ENGINE", "IDENTITY", "REQUIRED", "STORE_RESPONSE", "AUTHORIZE_REPLAY")

#: Middleware that checks a request in ``process_view``, as this one begins it there: in the order
#: of MIDDLEWARE, so these must be above.
_CHECKS = (
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
)

#: The attribute of a request that has its `Exchange`.
ATTRIBUTE = "_idempotency"


def by_user(request: HttpRequest) -> str | None:
    """Identifies a client by `request.user`, the default. Anonymous users have no identity."""
    user = getattr(request, "user", None)
    if user is None:
        raise ImproperlyConfigured(
            "IdempotencyMiddleware needs request.user: put it below AuthenticationMiddleware in "
            f"MIDDLEWARE, or set {SETTING}['IDENTITY']"
        )
    if not user.is_authenticated or user.pk is None:
        return None
    kind = user.__class__
    return f"user {kind.__module__}.{kind.__qualname__}: {user.pk}"


def middleware_options(**changes: Any) -> dict[str, Any]:
    """Returns the arguments of the middleware.

    Args:
        changes: options of one view.

    Raises:
        ImproperlyConfigured: for the first invalid option, in one line.
    """
    options = getattr(settings, SETTING, None)
    if changes:
        options = {**(options or {}), **changes}
    if not isinstance(options, dict) or "ENGINE" not in options:
        raise ImproperlyConfigured(
            f"{SETTING} must be a dictionary whose ENGINE is an Idempotency or the path of one, "
            'such as {"ENGINE": "shop.celery.idem"}'
        )
    for name in options:
        if name not in OPTIONS:
            hint = did_you_mean(str(name), OPTIONS) or f"; it has {', '.join(OPTIONS)}"
            raise ImproperlyConfigured(f"{SETTING} has no option {name!r}{hint}")
    arguments = {OPTIONS[name]: _imported(name, value) for name, value in options.items()}
    readable = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    if readable is not None:
        limit = arguments.setdefault("max_body_bytes", min(MAX_BODY_BYTES, readable))
        if isinstance(limit, int) and limit > readable:
            raise ImproperlyConfigured(
                f"{SETTING}['MAX_BODY_BYTES'] is more than Django reads: also raise "
                f"DATA_UPLOAD_MAX_MEMORY_SIZE (now {readable})"
            )
    return arguments


def _imported(name: str, value: Any) -> Any:
    if name not in _PATHS or not isinstance(value, str):
        return value
    try:
        return import_string(value)
    except ImportError as error:
        raise ImproperlyConfigured(f"{SETTING}[{name!r}] cannot be imported: {error}") from error


class IdempotencyMiddleware(BaseMiddleware):
    """The middleware, with the options of the setting IDEMPOTENCY_MIDDLEWARE.

    `identity`, `required` and `authorize_replay` get the request, whose `resolver_match` is set.
    """

    sync_capable = async_capable = True

    #: The options of one view, which precede those of the settings. A subclass for that view sets
    #: them.
    _changes: Mapping[str, Any] = {}

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self._check_order()
        options = {"identity": by_user, **middleware_options(**self._changes)}
        try:
            super().__init__(get_response, **options)
        except SettingsError as error:
            raise ImproperlyConfigured(f"{SETTING}: {error}") from None
        self._is_async = iscoroutinefunction(get_response)
        self.process_view: Any = self._process_view
        if self._is_async:
            markcoroutinefunction(self)
            authorize: Any = self._authorize_replay
            if authorize is not None and not iscoroutinefunction(authorize):
                self._authorize_replay = sync_to_async(authorize)
        else:
            self.process_view = lambda *view: run_sync(self._process_view(*view))

    def _check_order(self) -> None:
        names, own = list(settings.MIDDLEWARE), f"{type(self).__module__}.{type(self).__qualname__}"
        below = names[names.index(own) :] if own in names else []
        for other in _CHECKS:
            if other in below:
                raise ImproperlyConfigured(
                    f"put {own} below {other} in MIDDLEWARE, since a request would begin before it "
                    "is checked"
                )

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        """Handles one request."""
        response = self._handle(request, self._app)
        return response if self._is_async else run_sync(response)

    async def _handle(
        self, request: HttpRequest, get_response: Callable[[HttpRequest], Any]
    ) -> HttpResponseBase:
        async with Exchange() as exchange:
            setattr(request, ATTRIBUTE, exchange)
            try:
                # The body is read here, because the view may consume it by parsing a form.
                self._check_body(request)
                # Django calls `process_view` before the view, and that begins the execution.
                response = await self._finished(get_response(request))
                if exchange.execution is not None:
                    await self._settle_view(exchange, request, response)
                return response
            except Answered as answered:
                return django_response(answered.response)

    async def _process_view(self, request: HttpRequest, *view: object) -> HttpResponse | None:
        """Begins the execution; returns a response unless the view is to run."""
        try:
            await self._begin_view(request)
        except Answered as answered:
            return django_response(answered.response)
        return None

    async def _begin_view(self, request: HttpRequest) -> None:
        if not self._applies(request, request.method or ""):
            return
        # In a thread, because `identity` and `required` may query the database.
        admit: Any = sync_to_async(self._admit) if self._is_async else self._admit
        admitted = await self._finished(admit(request))
        if admitted is not None:
            method_and_path = {"REQUEST_METHOD": request.method, "PATH_INFO": request.path_info}
            read = fingerprint({**request.META, **method_and_path}, request.body)
            await self._begin(getattr(request, ATTRIBUTE), request, admitted, read)

    def _check_body(self, request: HttpRequest) -> None:
        """Refuses a request with a key whose body cannot be read."""
        has_key = fields_of(request, KEY_HEADER)
        if not has_key or not self._applies(request, request.method or ""):
            return
        # Under WSGI, Django reads a chunked body as an empty one.
        declared = self._declared_length(request, reads_chunks=not isinstance(request, WSGIRequest))
        try:
            self._check_length(len(request.body), declared)
        except UnreadablePostError:
            raise self._refusal(Problem.BODY_INCOMPLETE) from None
        except RequestDataTooBig:
            raise self._refusal(Problem.BODY_TOO_LARGE) from None

    async def _settle_view(
        self, exchange: Exchange, request: HttpRequest, response: HttpResponseBase
    ) -> None:
        body = response.content if isinstance(response, HttpResponse) else None
        headers = [(name, str(value)) for name, value in response.items()]
        try:
            captured = Response(response.status_code, headers, body, response.reason_phrase)
            added = await self._settle(exchange, request, captured)
        except Answered:
            response.close()
            raise
        for name, value in added:
            response[name] = value


def django_response(response: Response) -> HttpResponse:
    """Returns the response as Django's, with no other headers."""
    converted = HttpResponse(response.body, status=response.status, reason=response.reason or None)
    del converted["Content-Type"]
    for name, value in response.headers:
        converted[name] = value
    return converted
