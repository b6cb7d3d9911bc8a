"""Describes the machine and the versions that figures were measured with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from labs.benchmarks.bench import private_server

LIBRARIES = (
    *("celery", "kombu", "redis", "celery-once", "celery-singleton"),
    *("python-redis-lock", "aws-lambda-powertools"),
)


def describe_machine() -> str:
    """Returns machine, versions and load average in one line."""
    with private_server() as server:
        server_version = f"{server.flavour} {server.version}"
    return "; ".join(
        (
            f"{os.cpu_count()} cores ({_processor()}), {_memory_gib():.0f} GB",
            f"{platform.system()}, Python {platform.python_version()}",
            f"{server_version} on the same machine, TCP on the loopback",
            ", ".join(f"{name} {_version(name)}" for name in LIBRARIES if _version(name)),
            f"load average before the run: {os.getloadavg()[0]:.1f}",
        )
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _memory_gib() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
