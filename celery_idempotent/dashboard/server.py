"""Serves the dashboard with uvicorn, for the command line."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from celery import Celery

from celery_idempotent.dashboard.access import local_user
from celery_idempotent.dashboard.application import asgi
from celery_idempotent.dashboard.protection import LOOPBACK_HOSTS
from celery_idempotent.errors import SettingsError

#: Seconds that open streams may take to end.
SHUTDOWN_SECONDS = 2


def serve(
    app: Celery,
    host: str,
    port: int,
    *,
    auth: str | None,
    read_only: bool,
    url_prefix: str,
    announce: Callable[[str], None],
) -> None:
    """Serves the dashboard until the process is interrupted.

    Args:
        auth: ``USER:PASSWORD``; None gives everyone every right, on the loopback interface alone.
        announce: called with a line that names the URL, when requests are accepted.

    Raises:
        SettingsError: if the address cannot be listened on.
    """
    application = asgi(
        app,
        auth=auth,
        authorize=None if auth else local_user,
        read_only=read_only,
        url_prefix=url_prefix,
        allowed_hosts=None if auth else LOOPBACK_HOSTS,
    )
    config = uvicorn.Config(
        application,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    with listener:
        name = f"[{host}]" if ":" in host else host
        path = url_prefix.rstrip("/")
        announce(f"Dashboard: http://{name}:{listener.getsockname()[1]}{path}/")
        uvicorn.Server(config).run(sockets=[listener])
