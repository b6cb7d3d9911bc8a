"""``dashboard``: serves the dashboard."""

from __future__ import annotations

import socket
from typing import Any

import click

from celery_idempotent.operations.cli.command import AppCommand

AUTH_VARIABLE = "CELERY_IDEMPOTENCY_DASHBOARD_AUTH"


@click.command(cls=AppCommand, has_json=False)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=5556, show_default=True, help="0: a free port."
)
@click.option(
    "--auth",
    metavar="USER:PASSWORD",
    envvar=AUTH_VARIABLE,
    show_envvar=True,
    help="Require a user and a password. Other users of the machine can read the option, but not "
    "the environment variable.",
)
@click.option("--read-only", is_flag=True, help="Disable forgetting and running again.")
@click.option(
    "--url-prefix", default="", metavar="/PATH", help="Serve below this path, behind a proxy."
)
@click.option(
    "--history", default="", metavar="FILE", help="Keep the data of the charts in this SQLite file."
)
@click.pass_obj
def dashboard(
    obj: Any, /, host: str, port: int, auth: str | None, tasks: object, **options: Any
) -> None:
    """Serve a web page for the person on call.

    Without --auth, it listens on the loopback interface only.
    """
    try:
        from celery_idempotent.dashboard import server
        from celery_idempotent.dashboard.application import asgi
        from celery_idempotent.dashboard.protection import LOOPBACK_HOSTS, local_user
    except ImportError as error:
        raise click.ClickException(
            f"{error.name} is not installed: pip install 'celery-idempotent[dashboard]'"
        ) from None
    if not auth and host not in LOOPBACK_HOSTS:
        raise click.UsageError(
            f"--host {host} may be reached from other machines: set {AUTH_VARIABLE} or --auth, or "
            f"listen on one of {', '.join(sorted(LOOPBACK_HOSTS))}"
        )
    application = asgi(
        obj.app,
        auth=auth or None,
        authorize=None if auth else local_user,
        allowed_hosts=None if auth else LOOPBACK_HOSTS,
        **options,
    )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
        # Accepted connections inherit TCP_NODELAY. asyncio does not set it for a socket that it is
        # given, and then each page would wait 40 ms for a delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}") from None
    with listener:
        name = f"[{host}]" if ":" in host else host
        path = options["url_prefix"].rstrip("/")
        click.echo(f"Dashboard: http://{name}:{listener.getsockname()[1]}{path}/")
        server.serve(application, listener)
