"""The clock that one program goes by: the machine's, plus what it has been stepped by.

It is libfaketime, put before the system's own clock when the program is loaded. What measures
durations (the monotonic clock) goes on undisturbed, as it does when a real clock is set.
"""

from __future__ import annotations

import os
from pathlib import Path

from celery_idempotent.testing.process import ServerError

__all__ = ["Clock", "find_faketime"]

#: Below /usr.
_PLACES = ("lib/*/faketime", "lib*/faketime", "local/lib/faketime")

_SHARED_MEMORY = Path("/dev/shm")


def find_faketime() -> Path | None:
    """Where the system has installed libfaketime; Linux only."""
    usr = Path("/usr")
    found = (path for place in _PLACES for path in usr.glob(f"{place}/libfaketime.so.1"))
    return next(found, None)


class Clock:
    """What a program whose `environment` this is takes for the time.

    Args:
        directory: for the file by which it is told.

    Raises:
        ServerError: libfaketime is missing.
    """

    def __init__(self, directory: Path) -> None:
        library = find_faketime()
        if library is None:
            raise ServerError("A clock to step needs libfaketime: apt-get install libfaketime.")
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
        """Set the clock forward, or back where `seconds` are negative; from now on, at once."""
        self._offset += seconds
        # In one move: an empty file would be read as no offset at all.
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{self._offset:+f}", encoding="ascii")
        fresh.replace(self._file)

    def runs(self, pid: int) -> None:
        """Tidy up behind a program that has started: libfaketime would, but not when killed."""
        for name in ("faketime_shm_", "sem.faketime_sem_"):
            _SHARED_MEMORY.joinpath(f"{name}{pid}").unlink(missing_ok=True)
