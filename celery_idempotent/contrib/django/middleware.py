"""Idempotency-Key middleware for Django, under WSGI and ASGI; see docs/http.md.

It belongs below AuthenticationMiddleware and CsrfViewMiddleware in ``MIDDLEWARE``. The key is
checked after the CSRF token and before the view, so that a request which no view handles, or whose
token is wrong, leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.core.exceptions import ImproperlyConfigured, RequestDataTooBig
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest, HttpResponse, UnreadablePostError
from django.http.response import HttpResponseBase

from celery_idempotent.contrib.django.settings import SETTING, middleware_options
from celery_idempotent.contrib.http import identity as identities
from celery_idempotent.contrib.http import problem
from celery_idempotent.contrib.http.fingerprint import fingerprint
from celery_idempotent.contrib.http.identity import anonymous
from celery_idempotent.contrib.http.key_header import KEY_HEADER
from celery_idempotent.contrib.http.middleware import (
    Admitted,
    BaseMiddleware,
    Exchange,
    response_marks,
    stored_by_default,
)
from celery_idempotent.contrib.http.response import Response
from celery_idempotent.contrib.wsgi import fields_of
from celery_idempotent.errors import SettingsError
from celery_idempotent.functions.context import ExecutionContext

__all__ = [
    "IdempotencyMiddleware",
    "anonymous",
    "by_cookie",
    "by_header",
    "by_user",
    "stored_by_default",
]

#: The attribute of a request that has its exchange.
_ATTRIBUTE = "_idempotency"


def by_user(request: HttpRequest) -> str | None:
    """Identifies a client by `request.user`: the default. Users who are not logged in have none."""
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


def by_header(name: str) -> Callable[[HttpRequest], str | None]:
    """Identifies a client by a header that only it can send, such as Authorization.

    Raises:
        ValueError: if `name` cannot be the name of a header.
    """
    return identities.by_header(_fields, name)


def by_cookie(name: str) -> Callable[[HttpRequest], str | None]:
    """Identifies a client by a cookie that only it has.

    Raises:
        ValueError: if `name` cannot be the name of a cookie.
    """
    return identities.by_cookie(_fields, name)


@dataclass(slots=True)
class _Exchange(Exchange):
    #: Holds the context of the execution; closing it releases the key.
    block: Any = None

    @property
    def runs(self) -> bool:
        """Whether the view is running, or has run, under the key."""
        return self.execution is not None and self.answer is None


class IdempotencyMiddleware(BaseMiddleware):
    """The middleware, with the options of the setting IDEMPOTENCY_MIDDLEWARE.

    `identity`, `required` and `authorize_replay` get the request, whose `resolver_match` is set.
    """

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        options = {"identity": by_user, **middleware_options()}
        try:
            super().__init__(get_response, **options)
        except SettingsError as error:
            raise ImproperlyConfigured(f"{SETTING}: {error}") from None
        self._is_async = iscoroutinefunction(get_response)
        self.process_view = self._begin_async if self._is_async else self._begin
        if self._is_async:
            markcoroutinefunction(self)
            authorize: Any = self._authorize_replay
            if authorize is not None and not iscoroutinefunction(authorize):
                self._authorize_replay = sync_to_async(authorize)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        """Handles one request."""
        if self._is_async:
            return self._call_async(request)
        with ExitStack() as block:
            exchange = self._read(request, block)
            if exchange.answer is not None:
                return _django_response(exchange.answer)
            response: HttpResponseBase = self._app(request)
            if exchange.runs:
                stored = self._part_to_store(response)
                with self._refusing(exchange):
                    if stored is None:
                        block.close()
                    else:
                        self._completed(exchange, stored, exchange.execution.complete(stored))
                self._authorize(exchange, request)
                return _settled(exchange, response)
            return response

    async def _call_async(self, request: HttpRequest) -> HttpResponseBase:
        async with AsyncExitStack() as block:
            exchange = self._read(request, block)
            if exchange.answer is not None:
                return _django_response(exchange.answer)
            response: HttpResponseBase = await self._app(request)
            if exchange.runs:
                stored = self._part_to_store(response)
                with self._refusing(exchange):
                    if stored is None:
                        await block.aclose()
                    else:
                        returned = await exchange.execution.complete(stored)
                        self._completed(exchange, stored, returned)
                await self._authorize_async(exchange, request)
                return _settled(exchange, response)
            return response

    def _begin(self, request: HttpRequest, *view: object) -> HttpResponse | None:
        """Is the hook `process_view`: returns a response, unless the view is to run."""
        if not self._concerns(request):
            return None
        exchange: _Exchange = getattr(request, _ATTRIBUTE)
        context = self._context_of(request, exchange)
        if context is not None:
            with self._refusing(exchange):
                self._begun(exchange, exchange.block.enter_context(context))
            self._authorize(exchange, request)
        return None if exchange.answer is None else _django_response(exchange.answer)

    async def _begin_async(self, request: HttpRequest, *view: object) -> HttpResponse | None:
        if not self._concerns(request):
            return None
        exchange: _Exchange = getattr(request, _ATTRIBUTE)
        # In a thread, because `identity` and `required` may query the database.
        context = await sync_to_async(self._context_of)(request, exchange)
        if context is not None:
            with self._refusing(exchange):
                self._begun(exchange, await exchange.block.enter_async_context(context))
            await self._authorize_async(exchange, request)
        return None if exchange.answer is None else _django_response(exchange.answer)

    def _concerns(self, request: HttpRequest) -> bool:
        return self._applies(request.method or "", bool(_fields(request, KEY_HEADER)))

    def _read(self, request: HttpRequest, block: ExitStack | AsyncExitStack) -> _Exchange:
        """Reads the body of a request with a key: once a form was parsed, it would be gone."""
        exchange = _Exchange(block=block)
        setattr(request, _ATTRIBUTE, exchange)
        if not _fields(request, KEY_HEADER) or not self._concerns(request):
            return exchange
        declared = request.META.get("CONTENT_LENGTH") or ""
        exchange.answer = self._check_length(declared, 0, ended=False)
        is_chunked = bool(not declared and _fields(request, "transfer-encoding"))
        if is_chunked and isinstance(request, WSGIRequest):  # Django would read an empty body
            exchange.answer = self._refusal(problem.LENGTH_REQUIRED)
        if exchange.answer is None:
            try:
                exchange.answer = self._check_length(declared, len(request.body), ended=True)
            except UnreadablePostError:
                exchange.answer = self._refusal(problem.BODY_INCOMPLETE)
            except RequestDataTooBig:
                exchange.answer = self._refusal(problem.body_too_large(self._max_body_bytes))
        return exchange

    def _context_of(self, request: HttpRequest, exchange: _Exchange) -> ExecutionContext | None:
        """Returns the context of the request's execution, unless it has no key or an answer."""
        admitted = self._admit(request, _fields(request, KEY_HEADER))
        if not isinstance(admitted, Admitted):
            exchange.answer = admitted
            return None
        return self._context(
            admitted,
            fingerprint(
                request.method or "",
                request.META.get("SCRIPT_NAME", ""),
                request.path_info,
                request.META.get("QUERY_STRING", ""),
                request.META.get("CONTENT_TYPE", ""),
                request.META.get("HTTP_CONTENT_ENCODING", ""),
                request.body,
            ),
        )

    def _part_to_store(self, response: HttpResponseBase) -> dict[str, Any] | None:
        """Returns what to store of a response; of one that is streamed, that there was one."""
        whole = isinstance(response, HttpResponse)
        body = response.content if isinstance(response, HttpResponse) else b""
        headers = [(name, str(value)) for name, value in response.items()]
        return self._to_store(
            Response(response.status_code, headers, body, response.reason_phrase), whole=whole
        )


def _settled(exchange: _Exchange, response: HttpResponseBase) -> HttpResponseBase:
    """Returns what to send when `response` was stored, or the key released."""
    if exchange.answer is not None:
        response.close()
        return _django_response(exchange.answer)
    for name, value in response_marks(exchange):
        response[name] = value
    return response


def _django_response(response: Response) -> HttpResponse:
    """Returns a response with these headers alone."""
    converted = HttpResponse(response.body, status=response.status, reason=response.reason or None)
    del converted["Content-Type"]
    for name, value in response.headers:
        converted[name] = value
    return converted


def _fields(request: HttpRequest, name: str) -> list[str]:
    """Returns the header fields `name`: under ASGI, too, Django has them as WSGI does."""
    return fields_of(request.META, name)
