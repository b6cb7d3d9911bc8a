"""Starts private Redis servers with TLS, users, replication, Sentinel mode or an own clock."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

from celery_idempotent.testing.ports import Ports
from celery_idempotent.testing.process import Program
from celery_idempotent.testing.server import (
    DEFAULTS,
    RedisServer,
    RedisServerError,
    append_directives,
    choose,
    find_servers,
    make_directory,
)
from tests.servers.certificate import Certificate
from tests.servers.clock import Clock
from tests.servers.waiting import wait_until

_TLS_CHECK_SECONDS = 10.0

# Valkey reads the clock once per millisecond and extrapolates in between.
_CLOCK_CACHED_SECONDS = 0.002


class ConfigurableRedisServer(RedisServer):
    """A private server with every option that this project's tests need."""

    def __init__(
        self,
        url: str,
        program: Program | None = None,
        ports: Ports | None = None,
    ) -> None:
        self._clock: Clock | None = None
        super().__init__(url, program, ports)

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
    ) -> ConfigurableRedisServer:
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
                not reply within 20 s.
        """
        program = _choose_with_tls(kind) if tls else choose(kind)
        directory = make_directory()
        try:
            own_clock = Clock(directory) if clock else None
            ports = None if port or unix_socket else Ports(1)
            port = ports.numbers[0] if ports else port
            url, directives = _listen_directives(directory, port, tls=tls)
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
        server = cls._launch(
            program,
            url,
            directory,
            {**directives, **(config or {})},
            ports=ports,
            arguments=["--sentinel"] if sentinel else [],
            environment=own_clock.environment if own_clock else None,
        )
        server._clock = own_clock
        server._finish_start(replica_of)
        return server

    def restart(self, *, replica_of: RedisServer | None = None) -> None:
        """Shuts the server down, if it runs, and starts it on the same URL.

        Args:
            replica_of: the master from now on; returns when all of its data is copied.
        """
        if replica_of:
            settings = self._owned_program().directory / "server.conf"
            append_directives(settings, _replication_directives(replica_of))
        super().restart()
        self._finish_start(replica_of)

    def url_as(self, user: str, password: str) -> str:
        """Returns `url` with the credentials of one of its `users`."""
        return _with_credentials(self.url, user, password)

    def step_clock(self, seconds: float) -> None:
        """Sets the server's clock forward, or back for negative `seconds`.

        Raises:
            RedisServerError: the server uses the machine's clock.
        """
        if self._clock is None:
            raise RedisServerError(
                "This server uses the machine's clock: start it with clock=True."
            )
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

    def _finish_start(self, master: RedisServer | None) -> None:
        if self._clock is not None:
            self._clock.remove_shared_memory(self._owned_program().pid)
        if master is not None:
            wait_until(lambda: self.is_copy_of(master), "The replica did not get the master's data")


@cache
def has_tls(path: Path) -> bool:
    """Whether a server program was built with TLS.

    The program is started with a TLS port and without a certificate. It always exits; only one
    that has TLS names the missing certificate.
    """
    command = [str(path), "--port", "0", "--tls-port", "1", "--save", ""]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TLS_CHECK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"tls-cert-file" in result.stdout


def find_tls_servers() -> dict[str, Path]:
    """Returns the server programs that have TLS, by kind."""
    return {kind: program for kind, program in find_servers().items() if has_tls(program)}


def _choose_with_tls(kind: str) -> Path:
    for name, server in find_tls_servers().items():
        if kind in (name, "any"):
            return server
    description = "Redis-compatible" if kind == "any" else kind
    raise RedisServerError(
        f"No {description} server with TLS here (found: {', '.join(find_servers()) or 'none'}): "
        "servers from pip packages do not have TLS, those from the system do: apt-get install "
        "redis-server."
    )


def _listen_directives(
    directory: Path, port: int | None, *, tls: bool
) -> tuple[str, dict[str, str]]:
    """Returns a server's URL and the directives to listen there; no port means a Unix socket."""
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


def _with_credentials(url: str, user: str, password: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    credentials = f"{quote(user, safe='')}:{quote(password, safe='')}"
    return parts._replace(netloc=f"{credentials}@{host}").geturl()


def _replication_directives(master: RedisServer) -> dict[str, str]:
    password = urlsplit(master.url).password
    directives = {"replicaof": f"127.0.0.1 {master.port}"}
    return directives | ({"masterauth": unquote(password)} if password else {})
