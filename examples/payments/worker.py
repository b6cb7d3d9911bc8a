"""Starts and stops a ``celery worker`` with a prefork pool.

The worker also imports this module (``-A``): for the tasks, and for the
handler that ends the worker with the demo.
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
#: The folder of `examples` or, in an installation, of `celery_idempotent`.
FOLDER = Path(__file__).resolve().parents[2]

PR_SET_PDEATHSIG = 1  # from Linux's <sys/prctl.h>


class WorkerError(Exception):
    """The worker did not start, or stopped by itself."""


class Worker:
    """A context manager that starts a worker, waits until it is ready, and stops it at the end."""

    def __init__(self, environment: Mapping[str, str], log: Path, concurrency: int = 3) -> None:
        self._environment = {**os.environ, **environment}
        self._log = log
        self._command = [
            *(sys.executable, "-m", "celery", "-A", __name__, "worker"),
            *("--pool", "prefork", "--concurrency", str(concurrency), "--loglevel", "INFO"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Worker:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=FOLDER,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C must reach the demo alone, which then stops the worker.
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
        """Raises `WorkerError` with the last line of the log if the worker has stopped."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise WorkerError(
                f"The worker stopped with code {code}; its last log line: {self._last_line()}"
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            self.check()
            if app.control.ping(timeout=0.25, limit=1):
                return
        raise WorkerError(
            f"The worker was not ready after {START_TIMEOUT_SECONDS:.0f} s; "
            f"its last log line: {self._last_line()}"
        )

    def _stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            # The session consists of the worker and its pool.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "none")


@worker_init.connect
@worker_process_init.connect
def _die_with_parent(**_: object) -> None:
    """On Linux, makes the worker end with the demo, and pool processes with the worker."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
