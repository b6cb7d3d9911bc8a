"""A program of one's own: runs in a temporary directory, is gone with its owner.

What the launchers of private servers share. A program ends when its owner discards it; on Linux
also when its owner is killed, which leaves the directory behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from typing_extensions import Self

__all__ = ["Program", "ServerError", "Stoppable", "wait_until"]

S = TypeVar("S")

_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.01

#: How long servers may take to agree. A Sentinel that finds its timer late, as on a busy machine,
#: does nothing for 30 seconds (its TILT mode).
WAIT_SECONDS = 45.0

# Linux kills the child when its parent ends. Set by a program in between, since code between
# fork and exec is not safe in a process with threads. The parent may be gone already: look.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerError(RuntimeError):
    """A private server cannot be had, did not start, or is not ours to touch."""


class Stoppable:
    """What a ``with`` block ends by `stop`."""

    def stop(self) -> None:
        """End it. Twice is once."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Program:
    """A program with its directory: can be launched again and again, one process at a time.

    Args:
        directory: where it logs; made by the caller, removed by `discard`.
        name: of its log there.
        command: the program's absolute path, then its arguments.
        environment: its variables; its owner's if None.
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
        self._directory = directory
        self._log = directory / f"{name}.log"
        self._owner_pid = os.getpid()
        self._child: subprocess.Popen[bytes]
        self._thread = threading.Thread()  # never started: nothing runs yet

    @property
    def pid(self) -> int:
        return self._child.pid

    def launch(self) -> None:
        """Start the child from a thread of its own, which then waits for the child's end.

        Linux takes the thread that forked, not the process, for the parent whose death kills
        the child; and the caller's thread may end before the program should. A program that
        cannot be run is one that `ended`; its `last_words` say why.
        """
        launched = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(launched,), daemon=True)
        self._thread.start()
        launched.wait()

    def _run(self, launched: threading.Event) -> None:
        try:
            with self._log.open("wb") as log:
                try:
                    # A session of its own: Ctrl-C at a terminal is for the owner.
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
        """Signal the child, paused or not, and wait for its end; SIGKILL it if it lingers."""
        for wanted in (signum, signal.SIGKILL):
            if not self.ended():
                self.send(wanted)
                self.send(signal.SIGCONT)
                self._thread.join(_STOP_SECONDS)

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def discard(self) -> None:
        """End the child and remove the directory; a fork of the owner leaves both alone."""
        if os.getpid() == self._owner_pid:
            self.end(signal.SIGKILL)
            shutil.rmtree(self._directory, ignore_errors=True)

    def output(self) -> list[str]:
        """The lines that the child has printed since it was launched."""
        return self._log.read_text(encoding="utf-8", errors="replace").splitlines()

    def output_tail(self) -> str:
        """The last two lines that the child printed: the second alone often does not tell."""
        return " ".join(line.strip() for line in self.output()[-2:]) or "it printed nothing."


def wait_until(condition: Callable[[], bool], complaint: str) -> None:
    """Ask again and again until `condition` holds.

    Raises:
        ServerError: it did not within 45 s; begins with `complaint`.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise ServerError(f"{complaint} within {WAIT_SECONDS:g} s.")
        time.sleep(_POLL_SECONDS)
