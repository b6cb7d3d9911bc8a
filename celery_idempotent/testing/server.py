"""A private Redis-compatible server: its own directory and port, gone with its owner.

    with RedisServer.start() as server:
        client = server.client()

Servers are real ones, started from a program that pip or the system installed. A server listens
on 127.0.0.1 only (or on a Unix socket only), keeps nothing on disk unless its `config` says so,
and is ended when its owner stops it, drops it or exits. On Linux it also dies with an owner that
is killed; then its temporary directory stays behind.
"""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_idempotent.testing.certificate import Certificate
from celery_idempotent.testing.clock import Clock
from celery_idempotent.testing.discovery import (
    Binary,
    External,
    RedisServerError,
    choose,
    find_servers,
)
from celery_idempotent.testing.ports import Ports
from celery_idempotent.testing.process import Program, Stoppable, wait_until

__all__ = ["Binary", "External", "RedisServer", "RedisServerError", "find_servers"]

_START_SECONDS = 20.0
_POLL_SECONDS = 0.002

# Valkey looks at the clock once in a millisecond; in between, it counts on.
_CLOCK_CACHED_SECONDS = 0.002


class RedisServer(Stoppable):
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

    def __init__(
        self,
        url: str,
        program: Program | None = None,
        ports: Ports | None = None,
        settings: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.url = url
        self.owned = program is not None
        self._program = program
        self._settings = settings
        self._clock = clock
        if program is not None:
            self._discard = weakref.finalize(self, _discard, program, ports)
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
        tls: bool = False,
        password: str | None = None,
        users: Mapping[str, str] | None = None,
        replica_of: RedisServer | None = None,
        sentinel: bool = False,
        clock: bool = False,
        config: Mapping[str, str] | None = None,
    ) -> RedisServer:
        """Start a server and return when it answers PING.

        Args:
            kind: a kind that `find_servers` lists, or "any" for the first of them that can do what
                is asked. Whatever else is asked needs a server of one's own: "any" then passes
                over REDIS_URL.
            port: TCP port on 127.0.0.1; a free one if None.
            unix_socket: listen on a socket in the server's own directory instead of on TCP.
            tls: speak TLS instead of plain TCP, under a certificate made for it; `url` names the
                authority to trust. Needs the package trustme, and a server with TLS built in.
            password: of the user that `url` is for; none if None.
            users: further ones by name, each with its rules as ACL SETUSER has them, such as
                `{"shop": "on >secret ~idem:* +@all"}`; see `url_as`.
            replica_of: the server to copy; returns when it has all of it.
            sentinel: run as a Sentinel; `config` says what it watches.
            clock: with one of its own, for `step_clock`. Needs libfaketime, and a server that it
                can be put before: those from packages, not Debian's.
            config: directives as redis.conf has them, such as `{"appendonly": "yes"}`.

        Raises:
            ServerError: there is no such server here, what it needs is missing, or it did not
                answer within 20 s.
        """
        special = (port, unix_socket, tls, password, users, replica_of, sentinel, clock, config)
        private = any(option not in (None, False) for option in special)
        server = choose(kind, private=private, tls=tls)
        if isinstance(server, External):
            return cls(server.url)
        directory = Path(tempfile.mkdtemp(prefix="redis-server-"))
        try:
            own_clock = Clock(directory) if clock else None
            ports = None if port or unix_socket else Ports(1)
            port = ports.numbers[0] if ports else port
            url, directives = _listening(directory, port, tls=tls)
        except BaseException:
            shutil.rmtree(directory)
            raise
        directives |= {"bind": "127.0.0.1", "dir": str(directory)}
        if not sentinel:  # which knows no such directives
            directives |= {"save": '""', "repl-diskless-sync-delay": "0"}
        if password:
            url = _with_credentials(url, "", password)
            directives |= {"requirepass": password, "masterauth": password}
        if replica_of:
            directives |= _following(replica_of)
        directives |= {f"user {name}": rules for name, rules in (users or {}).items()}
        settings = directory / "server.conf"
        _add(settings, directives | dict(config or {}))
        command = [str(server.path), str(settings), *(["--sentinel"] if sentinel else [])]
        environment = own_clock.environment if own_clock else None
        program = Program(directory, "server", command, environment)
        started = cls(url, program, ports, settings, own_clock)
        if replica_of:
            started._await_copy_of(replica_of)
        return started

    @property
    def port(self) -> int:
        """On 127.0.0.1; 0 if it listens on a Unix socket."""
        return urlsplit(self.url).port or 0

    @property
    def running(self) -> bool:
        """Whether its process lives, be it frozen."""
        return not self._ours().ended()

    def url_as(self, user: str, password: str) -> str:
        """The `url` of one of its `users`."""
        return _with_credentials(self.url, user, password)

    def client(self, **options: Any) -> redis.Redis:
        """A new redis-py client of this server; `options` as `redis.Redis.from_url` has them."""
        # redis-py and Celery spell the URL of a Unix socket differently.
        url = self.url.replace("redis+socket://", "unix://", 1)
        if "db" in options:  # in redis-py the URL's database outranks the keyword
            url = re.sub(r"/\d+(?=\?|$)", "", url)
        return redis.Redis.from_url(url, **options)

    def stop(self) -> None:
        """End the server and remove its directory. Twice is once; REDIS_URL is left alone."""
        if self.owned:
            self._discard()

    def kill(self) -> None:
        """End the server as a crash would (SIGKILL); `restart` brings it back."""
        self._ours().end(signal.SIGKILL)

    def restart(self, *, replica_of: RedisServer | None = None) -> None:
        """Shut the server down in order, if it runs, and start it on the same URL.

        Data lives on only as far as `config` made it durable.

        Args:
            replica_of: the server to copy from now on; returns when it has all of it.
        """
        program = self._ours()
        program.end(signal.SIGTERM)
        if replica_of and self._settings:
            _add(self._settings, _following(replica_of))
        program.launch()
        self._await_answer()
        if replica_of:
            self._await_copy_of(replica_of)

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open and nothing answers."""
        self._ours().send(signal.SIGSTOP)

    def resume(self) -> None:
        """Thaw the server (SIGCONT)."""
        self._ours().send(signal.SIGCONT)

    def step_clock(self, seconds: float) -> None:
        """Set the server's clock forward, or back where `seconds` are negative.

        Raises:
            RedisServerError: it goes by the machine's: start it with `clock=True`.
        """
        if self._clock is None:
            raise RedisServerError("This server has no clock of its own: start it with clock=True.")
        self._clock.step(seconds)
        time.sleep(_CLOCK_CACHED_SECONDS)

    def is_copy_of(self, master: RedisServer) -> bool:
        """Whether this replica has all that `master` has been told up to now."""
        with master.client() as client:
            told: dict[str, Any] = client.info("replication")
        with self.client() as client:
            known: dict[str, Any] = client.info("replication")
        return (
            known.get("master_port") == master.port
            and known["master_link_status"] == "up"
            and known["slave_repl_offset"] >= told["master_repl_offset"]
        )

    def _ours(self) -> Program:
        if self._program is None:
            raise RedisServerError("The server that REDIS_URL names is not ours to end or freeze.")
        if not self._discard.alive:
            raise RedisServerError("This server was stopped for good.")
        return self._program

    def _await_copy_of(self, master: RedisServer) -> None:
        wait_until(lambda: self.is_copy_of(master), "The replica did not get the master's data")

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
                        words = self._program.output_tail()
                        raise RedisServerError(f"The server did not start: {words}") from error
                time.sleep(_POLL_SECONDS)
        if self._program is not None and info["process_id"] != self._program.pid:
            raise RedisServerError(f"Another server answers at {self.url}.")
        if self._clock is not None:
            self._clock.runs(info["process_id"])
        self.flavour = "valkey" if "valkey_version" in info else "redis"
        self.version = str(info.get("valkey_version") or info["redis_version"])


def _listening(directory: Path, port: int | None, *, tls: bool) -> tuple[str, dict[str, str]]:
    """A server's URL, and the directives that make it answer there; None is a Unix socket's."""
    if port is None:
        path = directory / "socket"
        return f"redis+socket://{path}", {"port": "0", "unixsocket": str(path)}
    if not tls:
        return f"redis://127.0.0.1:{port}/0", {"port": str(port)}
    certificate = Certificate.make(directory)
    trust = {"ssl_cert_reqs": "required", "ssl_ca_certs": str(certificate.authority)}
    return f"rediss://127.0.0.1:{port}/0?{urlencode(trust, safe='/')}", {
        "port": "0",
        "tls-port": str(port),
        "tls-ca-cert-file": str(certificate.authority),
        "tls-cert-file": str(certificate.chain),
        "tls-key-file": str(certificate.key),
        "tls-auth-clients": "no",
    }


def _discard(program: Program, ports: Ports | None) -> None:
    program.discard()
    if ports:
        ports.stop()


def _with_credentials(url: str, user: str, password: str) -> str:
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    credentials = f"{quote(user, safe='')}:{quote(password, safe='')}"
    return parts._replace(netloc=f"{credentials}@{place}").geturl()


def _following(master: RedisServer) -> dict[str, str]:
    password = urlsplit(master.url).password
    directives = {"replicaof": f"127.0.0.1 {master.port}"}
    return directives | ({"masterauth": unquote(password)} if password else {})


def _add(settings: Path, directives: Mapping[str, str]) -> None:
    """Directives, after those that are there: the last one of a name holds."""
    with settings.open("a", encoding="utf-8") as file:
        file.writelines(f"{name} {value}\n" for name, value in directives.items())
