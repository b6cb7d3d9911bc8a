"""Starts Celery's command in forks of one process that has imported Celery.

Importing it takes longer than all else that a worker does to start, and the tests start hundreds.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.waiting import eventually

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        *("celery.apps.worker", "celery.backends.redis", "celery.bin.celery"),
        *("celery.concurrency.prefork", "celery.fixups.django", "celery.worker.consumer"),
        *("kombu.transport.redis", "celery_idempotent.operations.cli", "pytest_celery"),
    ]
)


class ForkedCelery:
    """A ``celery`` command, with the interface of a `Popen`."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], directory: Path, log: Path
    ) -> None:
        args = list(arguments), dict(environment), directory, log
        self._process = _CONTEXT.Process(target=_run, args=args, name="MainProcess", daemon=True)
        self._process.start()
        self.pid: int = self._process.pid or 0
        # As with Popen, its process group can be killed from now on.
        eventually(lambda: self.poll() is not None or self._leads_a_group(), "it leads a group")

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("celery", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _leads_a_group(self) -> bool:
        with suppress(ProcessLookupError):
            return os.getpgid(self.pid) == self.pid
        return False


def _run(arguments: list[str], environment: Mapping[str, str], directory: Path, log: Path) -> None:
    """Becomes the process that ``python celery ...`` starts."""
    os.setsid()
    with log.open("ab") as output:
        os.dup2(output.fileno(), sys.__stdout__.fileno())
        os.dup2(output.fileno(), sys.__stderr__.fileno())
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments  # with which Celery starts itself again after SIGHUP
    from celery.__main__ import main

    try:
        main()
    finally:
        # multiprocessing leaves these out.
        atexit._run_exitfuncs()
