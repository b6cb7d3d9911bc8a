"""Checks that the installed versions are recent enough and work together."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from celery_idempotent.doctor.finding import Finding, Severity

#: The oldest tested versions.
OLDEST = {"celery": (5, 3), "kombu": (5, 3), "redis": (4, 5)}
#: Since this version, kombu's Redis transport refuses older redis.
STRICT_KOMBU, REDIS_OF_STRICT_KOMBU = (5, 7), (6, 4)


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
    """Yields a finding for each package too old for this one or for another."""
    versions = installed()
    numbers = {n: tuple(map(int, re.findall(r"\d+", v)[:2])) for n, v in versions.items()}
    for name, oldest in OLDEST.items():
        why = "it is not tested with this version"
        if name == "redis" and numbers.get("kombu", ()) >= STRICT_KOMBU:
            oldest, why = REDIS_OF_STRICT_KOMBU, f"kombu {versions['kombu']} cannot use it"
        if () < numbers.get(name, ()) < oldest:
            yield Finding(
                "version",
                Severity.ERROR,
                "worker",
                f"{name} {versions[name]} is too old",
                f"pip install '{name}>={'.'.join(map(str, oldest))}'",
                why,
            )
