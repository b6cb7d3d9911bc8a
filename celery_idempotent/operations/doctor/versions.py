"""Checks that the installed versions are recent enough and work together.

Also that threads do not inherit context variables, which a build of Python may change.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from celery_idempotent.operations.doctor.finding import Finding, Severity

#: The oldest tested versions.
OLDEST = {"celery": "5.3", "kombu": "5.3", "redis": "4.5.2"}
#: Since this version, kombu's Redis transport refuses older redis.
STRICT_KOMBU, REDIS_OF_STRICT_KOMBU = "5.7", "6.4"

#: Whether a thread begins with the context variables of the thread that starts it: the default of
#: Python without a GIL.
THREADS_INHERIT_CONTEXT = bool(getattr(sys.flags, "thread_inherit_context", 0))


def installed() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages by name."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("celery-idempotent", *OLDEST):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def check() -> Iterator[Finding]:
    """Yields a finding for each package too old for this one or for another, and for threads."""
    if THREADS_INHERIT_CONTEXT:
        yield Finding(
            "thread-contexts", Severity.ERROR, "worker",
            "threads inherit the execution and the transaction of the body that starts them",
            "PYTHON_THREAD_INHERIT_CONTEXT=0",
            "a thread that serves later bodies would go on with those of the first",
        )  # fmt: skip
    versions = installed()
    is_strict = Version(versions.get("kombu", "0")) >= Version(STRICT_KOMBU)
    for name, oldest in OLDEST.items():
        why = "it is not tested with this version"
        if name == "redis" and is_strict:
            oldest, why = REDIS_OF_STRICT_KOMBU, f"kombu {versions['kombu']} cannot use it"
        if name in versions and Version(versions[name]) < Version(oldest):
            yield Finding(
                "version", Severity.ERROR, "worker",
                f"{name} {versions[name]} is too old", f"pip install '{name}>={oldest}'", why,
            )  # fmt: skip
