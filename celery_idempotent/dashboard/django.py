"""Django users: staff may see the dashboard, and permissions grant further rights."""

from __future__ import annotations

from importlib import import_module

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth import get_user
from django.db import close_old_connections
from django.http import HttpRequest
from starlette.requests import HTTPConnection

from celery_idempotent.dashboard.protection import Access, Authorize


def staff(
    *, forget: str | None = None, results: str | None = None, repeat: str | None = None
) -> Authorize:
    """Returns an `authorize` for :func:`celery_idempotent.dashboard.asgi`.

    It reads the session cookie of the Django site, which must be on the same host.

    Args:
        forget: the permission to forget records and rerun failed calls, such as
            ``"shop.delete_order"``; None denies everyone.
        results: the permission to see results, errors and arguments; None denies everyone.
        repeat: the permission to rerun completed calls, besides `forget`; None denies everyone.
    """

    def load(session_key: str) -> Access | None:
        close_old_connections()
        try:
            request = HttpRequest()
            request.session = import_module(settings.SESSION_ENGINE).SessionStore(session_key)
            user = get_user(request)
            if not (user.is_active and user.is_staff):
                return None
            return Access(
                user.get_username(),
                forget=forget is not None and user.has_perm(forget),
                results=results is not None and user.has_perm(results),
                repeat=repeat is not None and user.has_perm(repeat),
            )
        finally:
            close_old_connections()

    async def authorize(connection: HTTPConnection) -> Access | None:
        session_key = connection.cookies.get(settings.SESSION_COOKIE_NAME)
        return await sync_to_async(load)(session_key) if session_key else None

    return authorize
