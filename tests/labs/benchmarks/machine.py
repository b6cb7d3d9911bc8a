"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.labs.benchmarks.bench import own_server

LIBRARIES = (
    *("celery", "kombu", "redis", "celery-once", "celery-singleton"),
    *("python-redis-lock", "aws-lambda-powertools"),
)


def described() -> str:
    """Machine, versions, and what else kept the machine busy, in a line."""
    with own_server() as server:
        told = f"{server.flavour} {server.version}"
    return "; ".join(
        (
            f"{os.cpu_count()} cores ({_processor()}), {_gigabytes():.0f} GB",
            f"{platform.system()}, Python {platform.python_version()}",
            f"{told} on the same machine, TCP on the loopback",
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


def _gigabytes() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
