"""Checks the versions of the installed packages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from celery_idempotent.doctor.finding import Finding, Severity

#: The oldest versions that the tests run with.
OLDEST = {"celery": (5, 3), "kombu": (5, 3), "redis": (4, 5)}


def installed() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages by name."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("celery-idempotent", *OLDEST):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def check() -> Iterator[Finding]:
    """Yields a finding for each package that is too old."""
    versions = installed()
    for name, oldest in OLDEST.items():
        numbers = tuple(map(int, re.findall(r"\d+", versions.get(name, ""))[:2]))
        if numbers and numbers < oldest:
            yield Finding(
                "version",
                Severity.ERROR,
                "worker",
                f"{name} {versions[name]} is too old",
                f"pip install '{name}>={'.'.join(map(str, oldest))}'",
                "it is not tested with this version",
            )
