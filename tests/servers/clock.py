"""Gives one program a clock of its own: the machine's clock plus an adjustable offset.

libfaketime, preloaded into the program, replaces the system's real-time clock. The monotonic clock
is unaffected, as when a real clock is set.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.servers.program import ServerError

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
            raise ServerError(
                "A server with its own clock needs libfaketime: apt-get install libfaketime."
            )
        self._file = directory / "clock"
        self._offset = 0.0
        self.step(0.0)
        self.environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

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
