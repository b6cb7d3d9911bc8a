"""Runs a server program as a child process with its own temporary directory.

The program ends when its owner discards it. On Linux it also ends when its owner is killed; the
temporary directory then remains. Also what servers need: ports, a certificate, a clock of their
own, and a look at processes.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from typing_extensions import Self

_STOP_SECONDS = 10.0
_START_SECONDS = 60.0
_START_POLL_SECONDS = 0.005

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
    """A private server is missing, or failed to start."""


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
        env: its environment variables; those of this process if None.
    """

    def __init__(
        self, directory: Path, name: str, command: Sequence[str], env: dict[str, str] | None = None
    ) -> None:
        self._command = list(command)
        if sys.platform == "linux":
            wrapper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
            self._command = wrapper + self._command
        self._environment = env
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
        counts as ended; its log then contains the reason.
        """
        launched = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(launched,), daemon=True)
        self._thread.start()
        launched.wait()

    def _run(self, launched: threading.Event) -> None:
        try:
            with self._log.open("wb") as log:
                try:
                    streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                    # In a new session, so that Ctrl-C at a terminal reaches the owner only.
                    how = {"env": self._environment, "start_new_session": True, **streams}
                    self._child = subprocess.Popen(self._command, **how)
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

    def wait_until(self, is_ready: Callable[[], object]) -> None:
        """Polls `is_ready` until it is true.

        Raises:
            ServerError: the program has ended, or has not become ready within a minute.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not is_ready():
            if self.ended() or time.monotonic() > deadline:
                raise ServerError(f"The server did not start: {self._reason()}")
            time.sleep(_START_POLL_SECONDS)

    def _reason(self) -> str:
        """Returns the first errors that RabbitMQ has logged, or the last two lines of output.

        What follows RabbitMQ's errors is Erlang's report of the shutdown; the last line alone of
        other servers is often not informative.
        """
        output = self._log.read_text(encoding="utf-8", errors="replace")
        errors = re.findall(r"\[error\] <[\d.]+> +(\S.*)", output)[:3]
        return " ".join(errors or output.splitlines()[-2:]) or "it printed nothing."


#: How long servers may take to agree. A Sentinel whose timer is late, as on a busy machine,
#: does nothing for 30 seconds (its TILT mode).
WAIT_SECONDS = 45.0
POLL_INTERVAL = 0.01


def wait_until(condition: Callable[[], bool], error: str) -> None:
    """Polls `condition` until it is true.

    Raises:
        ServerError: it was not true within 45 s; the message begins with `error`.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise ServerError(f"{error} within {WAIT_SECONDS:g} s.")
        time.sleep(POLL_INTERVAL)


# Each port and its cluster bus port, 10,000 above, are below the range that systems use for
# outgoing connections: while a server is down, no client can be assigned its port or connect to
# itself on it.
_PORTS = range(20_000, 22_768)
_BUS_OFFSET = 10_000


class Ports(Stoppable):
    """Unused ports on 127.0.0.1 whose cluster bus ports are unused as well.

    On Linux the ports stay reserved until `stop`: no other process can be assigned them while a
    server starts or is down. On other systems they are only unused at the time of the call.

    Raises:
        ServerError: fewer than `count` ports are free.
    """

    def __init__(self, count: int) -> None:
        self.numbers: list[int] = []
        with ExitStack() as sockets:
            for port in random.sample(_PORTS, len(_PORTS)):
                try:
                    for number in (port, port + _BUS_OFFSET):
                        _reserve(sockets.enter_context(socket.socket()), number)
                except OSError:
                    continue
                self.numbers.append(port)
                if len(self.numbers) == count:
                    break
            else:
                raise ServerError(f"No free port from {_PORTS.start} to {_PORTS.stop - 1}.")
            reserved = sockets.pop_all() if sys.platform == "linux" else ExitStack()
        self._release = weakref.finalize(self, reserved.close)

    def stop(self) -> None:
        """Releases the ports. A second call has no effect."""
        self._release()


class Server(Stoppable):
    """A server that runs as one or more programs; it ends when its owner stops it or drops it.

    Args:
        ports: those that it listens on.
        programs: the server itself is the first one.
    """

    def __init__(self, ports: Ports | None, *programs: Program) -> None:
        self._program = programs[0]
        self._discard = weakref.finalize(self, _discard, ports, *programs)
        try:
            self.launch()
        except BaseException:
            self.stop()
            raise

    def launch(self) -> None:
        """Starts the server, and returns when a client can use it."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kills the server with SIGKILL, as a crash would; it can be started again."""
        self._program.end(signal.SIGKILL)

    def stop(self) -> None:
        """Stops the server and removes its directory. A second call has no effect."""
        self._discard()


def _discard(ports: Ports | None, *programs: Program) -> None:
    for program in programs:
        program.discard()
    if ports:
        ports.stop()


def _reserve(holder: socket.socket, port: int) -> None:
    """Binds a free port in such a way that only a server with SO_REUSEADDR can listen on it.

    On Linux two sockets can share a port if both set SO_REUSEADDR and neither listens. Servers set
    it; this socket sets it only after bind, so that the same port is not reserved twice.
    """
    holder.bind(("127.0.0.1", port))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


REPOSITORY = Path(__file__).parents[2]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A dead orphan is a zombie until init reaps it.
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):  # it has just ended, or the system has no /proc
        return not Path("/proc/self").exists()
    return status.rsplit(")", 1)[1].split()[0] != "Z"


#: The binary itself: the wrapper in /usr/bin leaves processes behind.
_DEBIAN = Path("/usr/lib/chromium/chromium-headless-shell")


def find_chromium() -> str | None:
    """Returns the path of the headless shell; None if there is none."""
    if _DEBIAN.exists():
        return str(_DEBIAN)
    return shutil.which("chromium-headless-shell") or shutil.which("chrome-headless-shell")


def find_promtool() -> str | None:
    """Returns the path of promtool, which comes with Prometheus; None if there is none."""
    return shutil.which("promtool")


PR_SET_PDEATHSIG = 1  # from Linux's <sys/prctl.h>


def die_with_parent(**_: object) -> None:
    """Lets Linux kill the worker when the tests end; Celery then ends the pool."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


#: Where packages install libfaketime, below /usr.
_DIRECTORIES = ("lib/*/faketime", "lib*/faketime", "local/lib/faketime")

_SHARED_MEMORY = Path("/dev/shm")


def find_faketime() -> Path | None:
    """Returns the path of the installed libfaketime; Linux only."""
    usr = Path("/usr")
    paths = (path for pattern in _DIRECTORIES for path in usr.glob(f"{pattern}/libfaketime.so.1"))
    return next(paths, None)


class Clock:
    """The real-time clock of a program that runs with `environment`.

    Args:
        directory: where the file that holds the offset is written.

    Raises:
        ServerError: libfaketime is not installed.
    """

    def __init__(self, directory: Path) -> None:
        library = find_faketime()
        if library is None:
            raise ServerError("libfaketime is not installed: apt-get install libfaketime")
        self._file = directory / "clock"
        self._offset = 0.0
        self.step(0.0)
        options = {"NO_CACHE": "1", "DONT_FAKE_MONOTONIC": "1", "TIMESTAMP_FILE": str(self._file)}
        self.environment = os.environ | {f"FAKETIME_{name}": options[name] for name in options}
        self.environment["LD_PRELOAD"] = str(library)

    def step(self, seconds: float) -> None:
        """Sets the clock forward, or back for negative `seconds`, with immediate effect."""
        self._offset += seconds
        # Replaced atomically: an empty file would be read as an offset of zero.
        replacement = self._file.with_suffix(".new")
        replacement.write_text(f"{self._offset:+f}", encoding="ascii")
        replacement.replace(self._file)

    def remove_shared_memory(self, pid: int) -> None:
        """Removes the shared memory of a started program; libfaketime leaves it after SIGKILL."""
        for name in ("faketime_shm_", "sem.faketime_sem_"):
            _SHARED_MEMORY.joinpath(f"{name}{pid}").unlink(missing_ok=True)
