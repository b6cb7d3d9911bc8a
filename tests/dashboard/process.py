"""``celery idempotency dashboard`` as a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]


class DashboardProcess(NamedTuple):
    """A dashboard that accepts requests."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def dashboard(app: str, *options: str, port: int = 0, **env: str) -> Iterator[DashboardProcess]:
    """Starts the command for an app; kills it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", app, "idempotency", "dashboard",
         "--port", str(port), *options],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"Dashboard: (http://\S+)\n", line)
        assert found, line
        yield DashboardProcess(found[1], process)
    finally:
        process.kill()
        process.communicate()
