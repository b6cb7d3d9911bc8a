"""Web servers as processes that can be killed, and the clients of their users."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import redis

from tests.servers.program import Ports
from tests.waiting import eventually

REPOSITORY = Path(__file__).parents[3]

#: Of the engine of each app, in seconds. Long enough for a busy machine, short enough to wait for
#: its end.
LEASE = 2.0
#: Bytes of the largest body, of a request and of a stored response.
MAX_BYTES = 100_000
CHUNK = b"0123456789" * 1000

UVICORN = ("uvicorn", "--log-level", "warning", "--port")
GUNICORN = ("gunicorn", "--log-level", "error", "--graceful-timeout", "1", "--worker-class")
GTHREAD = (*GUNICORN, "gthread", "--threads", "8")


class WebServer:
    """A server process, with its workers, that serves an app on a port of its own."""

    is_django = False

    def __init__(self, app: str, env: Mapping[str, str], server: tuple[str, ...] = UVICORN) -> None:
        self.server = server
        self._ports = Ports(1)
        (self.port,) = self._ports.numbers
        self.url = f"http://127.0.0.1:{self.port}"
        address = [str(self.port)] if server is UVICORN else ["--bind", f"127.0.0.1:{self.port}"]
        if server is UVICORN and app.endswith("()"):
            address.append("--factory")
            app = app.removesuffix("()")
        self._command = [sys.executable, "-m", *server, *address, app]
        self._environment = {**os.environ, **env}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.client = httpx.Client(base_url=self.url, timeout=60)
        self.start()

    def start(self) -> None:
        # In a new session, so that kill() kills the workers, too.
        how = {"cwd": REPOSITORY, "env": self._environment, "start_new_session": True}
        streams = {"stdout": self._log, "stderr": self._log}
        self._process = subprocess.Popen(self._command, **how, **streams)
        eventually(self._responds, f"{self._command} responds")

    def _responds(self) -> bool:
        assert self._process.poll() is None, self.log()
        try:
            self.client.get("/")
        except httpx.TransportError:
            return False
        return True

    @property
    def reads_no_chunked_body(self) -> bool:
        """Django reads none under WSGI."""
        return self.is_django and self.server is GTHREAD

    @property
    def stops_for_a_disconnect(self) -> bool:
        """Django cancels an async view whose client is gone."""
        return self.is_django and self.server is UVICORN

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def post(self, path: str, key: str | None, body: Any, **headers: str) -> httpx.Response:
        """Sends a request of the user alice."""
        return post(self.client, path, key, body, **{"Authorization": "Bearer alice", **headers})

    def user(self, name: str) -> httpx.Client:
        """Returns the client of a user who is logged in."""
        headers = {"Authorization": f"Bearer {name}"}
        return httpx.Client(base_url=self.url, timeout=60, headers=headers)

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self.client.close()
        self._log.close()
        self._ports.stop()


class DrfServer(WebServer):
    """A server of a Django project whose users send tokens."""

    is_django = True


class DjangoServer(DrfServer):
    """A server of the Django project, whose users log in with a form."""

    def user(self, name: str) -> httpx.Client:
        client = httpx.Client(base_url=self.url, timeout=60)
        client.headers["X-CSRFToken"] = client.get("/login").json()["token"]
        token = client.post("/login", data={"name": name}).json()["token"]
        client.headers["X-CSRFToken"] = token
        return client


#: App, server and class of the sites; with django- those whose users log in with a form.
SITES = {
    "fastapi-uvicorn": ("tests.http.sites.fastapi_site:app", UVICORN, WebServer),
    "flask-gthread": ("tests.http.sites.flask_site:app", GTHREAD, WebServer),
    "fastapi-routes-uvicorn": ("tests.http.sites.fastapi_site:routes_app", UVICORN, WebServer),
    "flask-routes-gthread": ("tests.http.sites.flask_site:routes_app", GTHREAD, WebServer),
    "drf-gthread": ("tests.http.sites.drf_site:application", GTHREAD, DrfServer),
    "django-gthread": ("django.core.wsgi:get_wsgi_application()", GTHREAD, DjangoServer),
    "django-uvicorn": ("django.core.asgi:get_asgi_application()", UVICORN, DjangoServer),
}


def post(
    client: httpx.Client, path: str, key: str | None, body: Any, **headers: str
) -> httpx.Response:
    if key is not None:
        headers["Idempotency-Key"] = key
    return client.post(path, json=body, headers=headers)


def request_count(client: redis.Redis, order: str) -> int:
    """Returns how often the apps have counted a request for `order`."""
    value: Any = client.get(f"requests:{order}")
    return int(value or 0)


@contextmanager
def serving(
    app: str, server: tuple[str, ...] = UVICORN, *, kind: type[WebServer] = WebServer, **env: str
) -> Iterator[Any]:
    web = kind(app, env, server)
    try:
        yield web
    finally:
        web.stop()
