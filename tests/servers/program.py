"""Runs a server program as a child process with its own temporary directory.

The program ends when its owner discards it. On Linux it also ends when its owner is killed; the
temporary directory then remains.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import Self

__all__ = ["Program", "ServerError", "Stoppable"]

_STOP_SECONDS = 10.0

# Makes Linux kill the program when its parent ends. A small Python program does this before it
# executes the server, because code between fork and exec is unsafe in a process with threads. The
# parent may have ended already, hence the comparison.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerError(RuntimeError):
    """A private server is missing, failed to start, or is not owned by this process."""


class Stoppable:
    """A context manager that calls `stop` when its block ends."""

    def stop(self) -> None:
        """Stops it. A second call has no effect."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Program:
    """A program that can be launched repeatedly, one process at a time.

    Args:
        directory: where its log is written; created by the caller, removed by `discard`.
        name: file name of the log, without its suffix.
        command: the absolute path of the program, followed by its arguments.
        environment: its environment variables; those of this process if None.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = list(command)
        if sys.platform == "linux":
            wrapper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
            self._command = wrapper + self._command
        self._environment = environment
        self.directory = directory
        self._log = directory / f"{name}.log"
        self._owner_pid = os.getpid()
        self._child: subprocess.Popen[bytes]
        self._thread = threading.Thread()  # not started: `ended` is true before the first launch

    @property
    def pid(self) -> int:
        return self._child.pid

    def launch(self) -> None:
        """Starts the child process from a new thread, which waits until the child ends.

        Linux kills the child when the thread that forked it ends, not when the process does, and
        the caller's thread may end before the program should. A program that cannot be executed
        counts as ended; `output_tail` then contains the reason.
        """
        launched = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(launched,), daemon=True)
        self._thread.start()
        launched.wait()

    def _run(self, launched: threading.Event) -> None:
        try:
            with self._log.open("wb") as log:
                try:
                    # In a new session, so that Ctrl-C at a terminal reaches the owner only.
                    self._child = subprocess.Popen(
                        self._command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=self._environment,
                        start_new_session=True,
                    )
                except OSError as error:
                    log.write(str(error).encode())
                    return
        finally:
            launched.set()
        self._child.wait()

    def send(self, signum: signal.Signals) -> None:
        self._child.send_signal(signum)

    def end(self, signum: signal.Signals) -> None:
        """Sends a signal to the child, paused or not, and waits for its end; then sends SIGKILL."""
        for number in (signum, signal.SIGKILL):
            if not self.ended():
                self.send(number)
                self.send(signal.SIGCONT)
                self._thread.join(_STOP_SECONDS)

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def discard(self) -> None:
        """Kills the child and removes the directory. Does nothing in a forked process."""
        if os.getpid() == self._owner_pid:
            self.end(signal.SIGKILL)
            shutil.rmtree(self.directory, ignore_errors=True)

    def output(self) -> list[str]:
        """Returns the lines that the child has printed since it was launched."""
        return self._log.read_text(encoding="utf-8", errors="replace").splitlines()

    def output_tail(self) -> str:
        """Returns the last two lines of output; the last one alone is often not informative."""
        return " ".join(line.strip() for line in self.output()[-2:]) or "it printed nothing."
