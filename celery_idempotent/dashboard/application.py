"""Assembles the dashboard as an ASGI application."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection
from importlib.resources import files
from mimetypes import guess_type

from celery import Celery
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from celery_idempotent.dashboard.changes import Changes
from celery_idempotent.dashboard.context import Context
from celery_idempotent.dashboard.presentation import is_api, json_response, render
from celery_idempotent.dashboard.protection import Authorize, BasicAuth, Protection, on_defect
from celery_idempotent.dashboard.views import Views
from celery_idempotent.errors import IdempotencyError, SettingsError, StoreUnavailableError

#: The contents of files, by name; the package may be inside a zip file.
_STATIC = {
    file.name: file.read_bytes()
    for file in (files("celery_idempotent.dashboard") / "static").iterdir()
}


def asgi(
    app: Celery,
    *,
    auth: str | None = None,
    authorize: Authorize | None = None,
    read_only: bool = False,
    url_prefix: str = "",
    allowed_hosts: Collection[str] | None = None,
    secret_key: str | bytes | None = None,
    history: str = "",
) -> ASGIApp:
    """Returns the dashboard of an app. Give either `auth` or `authorize`.

    Args:
        auth: ``USER:PASSWORD`` for HTTP basic authentication; this user has every right.
        authorize: returns the :class:`Access` of a request (a Starlette ``HTTPConnection``), or
            None to refuse it; may be a coroutine function.
        read_only: forbids everyone to forget records or rerun calls.
        url_prefix: the dashboard's path, such as ``/idempotency``, if requests arrive with the
            full path. Omit it under a framework's ``mount``.
        allowed_hosts: accepted names in the Host header; None for all.
        secret_key: signs forms; the same in all processes that serve the dashboard. By default
            each process generates a random one.
        history: a SQLite file for the charts' data, which is otherwise lost when the process
            ends.

    Raises:
        SettingsError: unless exactly one of `auth` and `authorize` is given; or if `auth` or
            `url_prefix` is malformed.
    """
    if (auth is None) == (authorize is None):
        raise SettingsError("asgi() needs one of auth='USER:PASSWORD' and authorize=a callable")
    if url_prefix and not (url_prefix.startswith("/") and url_prefix.strip("/")):
        raise SettingsError(f"url_prefix is not a path: write '/idempotency', not {url_prefix!r}")
    context = Context(app, secret_key, history)
    routes: list[BaseRoute] = [
        *Views(context).routes(),
        *Changes(context).routes(),
        Route("/static/{name}", _static_file),
    ]
    protection = Middleware(
        Protection,
        authorize=authorize or BasicAuth(auth or ""),
        allowed_hosts=allowed_hosts,
        read_only=read_only,
        url_prefix=url_prefix.rstrip("/"),
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        # So that the first page has findings. A mounted application gets no lifespan events, and
        # computes them at its first request.
        await run_in_threadpool(lambda: context.sampler.known_findings())
        yield
        context.close()

    application = Starlette(
        routes=routes,
        middleware=[protection],
        exception_handlers={
            HTTPException: _on_error,
            IdempotencyError: _on_error,
            Exception: on_defect,
        },
        lifespan=lifespan,
    )
    application.router.redirect_slashes = False
    return application


async def _static_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _STATIC:
        raise HTTPException(404)
    return Response(_STATIC[name], media_type=guess_type(name)[0])


def _on_error(request: Request, error: Exception) -> Response:
    """Responds with an error, such as an unreachable Redis, whose text contains no secrets."""
    status, text = 503 if isinstance(error, StoreUnavailableError) else 409, str(error)
    if isinstance(error, HTTPException):
        status, text = error.status_code, error.detail
    if is_api(request):
        return json_response({"error": text}, status)
    return render(request, "error.html", status=status, text=text)
