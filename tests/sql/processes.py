"""Modules of this folder that a test runs in a process of their own, such as one with Django."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.sql.databases import REPOSITORY


def output_of(module: str, *arguments: str) -> Any:
    """Runs a module; returns what it has passed to `dump`."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.sql.{module}", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def dump(value: Any) -> None:
    """Prints a value as JSON, for the process of the test."""
    print(json.dumps(value, default=str))


def dump_cases(*cases: Callable[[], Any]) -> None:
    """Prints what each of them returns, by its name."""
    dump({case.__name__: case() for case in cases})
