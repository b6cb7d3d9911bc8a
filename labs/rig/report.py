"""Tables in Markdown, and what they were measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from tests.servers.redis_server import RedisServer

MET, MISSED = "✓", "✗"


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a table; the first column is aligned to the left."""
    rows = [headings, ["---"] + ["--:"] * (len(headings) - 1), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def setting(*libraries: str) -> str:
    """Returns machine and versions, in one line.

    Args:
        libraries: further ones to name.
    """
    with RedisServer.start() as server:
        server_version = f"{server.flavour} {server.version}"
    names = ("celery", "kombu", "redis", *libraries)
    return (
        f"{os.cpu_count()} cores ({_processor()}), {platform.system()}, "
        f"Python {platform.python_version()}; {server_version}; "
        + ", ".join(f"{name} {version(name)}" for name in names)
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
