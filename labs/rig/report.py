"""Tables in Markdown, and what they were measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version

MET, MISSED = "✓", "✗"


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a table; the first column is aligned to the left."""
    rows = [headings, ["---"] + ["--:"] * (len(headings) - 1), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def setting(server: str) -> str:
    """Returns machine and versions, in one line.

    Args:
        server: flavour and version.
    """
    libraries = ", ".join(f"{name} {version(name)}" for name in ("celery", "kombu", "redis"))
    return (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}; "
        f"{server}; {libraries}"
    )
