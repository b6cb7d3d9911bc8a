"""A real ``celery worker`` with a prefork pool, started and stopped as a process of its own.

The worker loads this module too (``-A examples.payments.worker``), for the tasks and for the
handler that lets it die with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from celery.signals import worker_init, worker_process_init

from .tasks import app

START_TIMEOUT_SECONDS = 20.0
STOP_TIMEOUT_SECONDS = 5.0
REPOSITORY = Path(__file__).resolve().parents[2]

PR_SET_PDEATHSIG = 1  # from Linux's <sys/prctl.h>


class WorkerError(Exception):
    """The worker did not start, or ended on its own."""


class Worker:
    """``with Worker(environment, log): …``: ready on entry, gone on exit."""

    def __init__(self, environment: Mapping[str, str], log: Path, concurrency: int = 3) -> None:
        self._environment = {**os.environ, **environment}
        self._log = log
        self._command = [
            *(sys.executable, "-m", "celery", "-A", "examples.payments.worker", "worker"),
            *("--pool", "prefork", "--concurrency", str(concurrency), "--loglevel", "INFO"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Worker:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=REPOSITORY,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A session of its own: Ctrl-C is for us, and we stop the worker in good order.
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def check(self) -> None:
        """Raise `WorkerError` with its last words if the worker is gone."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise WorkerError(
                f"The worker ended with code {code}; it last said: {self._last_line()}"
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            self.check()
            if app.control.ping(timeout=0.25, limit=1):
                return
        raise WorkerError(
            f"The worker was not ready after {START_TIMEOUT_SECONDS:.0f} s; "
            f"it last said: {self._last_line()}"
        )

    def _stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            # The session is ours alone, so this reaches the worker and its pool and nobody else.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


@worker_init.connect
@worker_process_init.connect
def _die_with_parent(**_: object) -> None:
    """Have Linux end the worker with the demo, and pool children with the worker, come what may."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
