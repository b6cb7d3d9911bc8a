"""A mixin for views of Django REST framework; see docs/http.md.

The framework authenticates in the view, where middleware cannot see it. The mixin looks up the key
after authentication, permissions and throttles, for retries and first requests alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.views import View as DjangoView

from celery_idempotent.contrib.django.middleware import (
    ATTRIBUTE,
    IdempotencyMiddleware,
    anonymous,
    by_cookie,
    by_header,
    by_user,
    django_response,
    stored_by_default,
)
from celery_idempotent.contrib.http.middleware import Answered
from celery_idempotent.core.store import run_sync

__all__ = [
    "IdempotencyMixin",
    "anonymous",
    "by_cookie",
    "by_header",
    "by_user",
    "stored_by_default",
]

if TYPE_CHECKING:
    from rest_framework.views import APIView as View
else:
    View = object


class IdempotencyMixin(View):
    """Runs each request once for its key; must be the first base of an APIView or a viewset.

    The options are those of the setting IDEMPOTENCY_MIDDLEWARE, overridden by
    `idempotency_options`. `identity`, `required` and `authorize_replay` get the framework's
    request. With ATOMIC_REQUESTS, the view's transaction commits before its response is stored.
    """

    #: Options of this view, with the names of the setting.
    idempotency_options: ClassVar[Mapping[str, Any]] = {}

    #: The `_Protection` of the view; `as_view` sets it.
    _idempotency: Any = None
    #: Whether `initial` was called, and with it the lookup of the key.
    _is_reached = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in cls.__mro__[: cls.__mro__.index(IdempotencyMixin)]:
            if issubclass(base, DjangoView) and not issubclass(base, IdempotencyMixin):
                raise ImproperlyConfigured(
                    f"{cls.__qualname__}: IdempotencyMixin must precede {base.__name__} in the "
                    "bases, or its requests are unprotected"
                )

    @classmethod
    def as_view(cls, *args: Any, **initkwargs: Any) -> Callable[..., HttpResponseBase]:
        """Returns the view, after checking its options; the view begins its own transactions."""
        from rest_framework.views import APIView

        if not issubclass(cls, APIView):
            raise ImproperlyConfigured(
                f"{cls.__qualname__}: IdempotencyMixin needs an APIView; use IdempotencyMiddleware "
                "for views of Django"
            )
        actions: Mapping[str, str] = initkwargs.get("actions") or (args[0] if args else {})
        for name in (*cls.http_method_names, *actions.values()):
            if iscoroutinefunction(getattr(cls, name, None)):
                raise ImproperlyConfigured(
                    f"{cls.__qualname__}: {name} is a coroutine function, which IdempotencyMixin "
                    "does not await; make it a plain function"
                )
        protection = _Protection(cls)
        view: Any = super().as_view(*args, _idempotency=protection, **initkwargs)
        without: set[str] = getattr(view, "_non_atomic_requests", set())
        databases = connections.settings.items()
        atomic = {alias for alias, options in databases if options["ATOMIC_REQUESTS"]} - without
        for alias in atomic:
            view = transaction.non_atomic_requests(using=alias)(view)
        protection.atomic = atomic
        return view  # type: ignore[no-any-return]

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """Responds to a request, or replays the response to an earlier one."""

        def respond(request: HttpRequest) -> HttpResponseBase:
            with ExitStack() as transactions:
                for alias in self._idempotency.atomic:
                    transactions.enter_context(transaction.atomic(using=alias))
                try:
                    response = super(IdempotencyMixin, self).dispatch(request, *args, **kwargs)
                    if not self._is_reached:
                        raise ImproperlyConfigured(
                            f"{type(self).__qualname__}: initial() must call super().initial(), "
                            "which looks up the key"
                        )
                except Answered as answered:
                    # Returned, not raised: what authentication and throttles have written must be
                    # committed.
                    return django_response(answered.response)
            if isinstance(response, HttpResponse) and hasattr(response, "render"):
                response = response.render()
            return response

        return self._idempotency.respond(request, respond)

    def initial(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Authenticates, checks permissions and throttles, then looks up the key."""
        self._is_reached = True
        super().initial(request, *args, **kwargs)
        self._idempotency.begin(request)

    def handle_exception(self, exc: Exception) -> HttpResponseBase:
        """Returns the framework's response to an error, but not to a replay or a refusal."""
        if isinstance(exc, Answered):
            raise exc
        return super().handle_exception(exc)


class _Protection(IdempotencyMiddleware):
    """The middleware of one view."""

    #: The databases in which each request has a transaction (ATOMIC_REQUESTS); `as_view` sets it.
    atomic: frozenset[str] | set[str] = frozenset()

    def __init__(self, view: type[IdempotencyMixin]) -> None:
        self._changes = view.idempotency_options
        super().__init__(view.as_view)

    def respond(
        self, request: HttpRequest, get_response: Callable[[HttpRequest], HttpResponseBase]
    ) -> HttpResponseBase:
        if _is_running(request):  # under a key of the middleware in MIDDLEWARE
            return get_response(request)
        return run_sync(self._handle(request, get_response))

    def begin(self, request: Any) -> None:
        if not _is_running(request):
            run_sync(self._begin_view(request))


def _is_running(request: Any) -> bool:
    exchange = getattr(request, ATTRIBUTE, None)
    return exchange is not None and exchange.execution is not None
