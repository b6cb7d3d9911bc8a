"""What is installed here, and what of it is too old."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from celery_idempotent.doctor.finding import Finding, Severity

#: The oldest that the tests run with.
OLDEST = {"celery": (5, 3), "kombu": (5, 3), "redis": (4, 5)}


def installed() -> dict[str, str]:
    """Versions by name; what is not installed is left out."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("celery-idempotent", *OLDEST):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def check() -> Iterator[Finding]:
    """A finding for each package that is too old."""
    here = installed()
    for name, oldest in OLDEST.items():
        numbers = tuple(map(int, re.findall(r"\d+", here.get(name, ""))[:2]))
        if numbers and numbers < oldest:
            wanted = ".".join(map(str, oldest))
            yield Finding(
                "version",
                Severity.ERROR,
                "worker",
                f"{name} {here[name]} is too old",
                f"pip install '{name}>={wanted}'",
                "the tests do not run with it",
            )
