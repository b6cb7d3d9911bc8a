"""Leaves a Redis alone that does not answer, so that an outage costs a call microseconds.

Closed, every command goes through. A few failures in a row open it: commands are refused at once.
After a pause one caller asks whether Redis is back, with a PING that may take half a second, while
all others are still refused; each time it is not, the pause doubles. A library's breaker would do,
but for two things: theirs hold a lock while the command runs, one caller at a time, and their
probe is the next caller's command with its whole timeout.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from celery_idempotent.errors import StoreUnavailableError

FIRST_PAUSE = 1.0
#: Seconds that the probe may take.
PROBE_TIMEOUT = 0.5


class Breaker:
    """One for each place and process.

    Args:
        failures: in a row, that open it.
        longest_pause: seconds between two probes at most.
        probe: asks whether Redis answers; raises if not. One that is awaited is for the caller of
            `must_probe`.
    """

    def __init__(self, failures: int, longest_pause: float, probe: Callable[[], Any]) -> None:
        self._most = failures
        self._longest_pause = longest_pause
        self._probe = probe
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = 0.0
        self._again_at = 0.0

    @property
    def open(self) -> bool:
        """Whether commands are refused, but for the probe."""
        return self._failures >= self._most

    def enter(self) -> None:
        """Return where a command may be sent.

        Raises:
            StoreUnavailableError: if Redis is being left alone, or the probe failed.
        """
        if self.should_probe():
            try:
                self._probe()
            except StoreUnavailableError:
                self.record_failure()
                raise
            self.record_success()

    def should_probe(self) -> bool:
        """Whether it is for this caller to ask if Redis is back; if not, it may go on.

        Raises:
            StoreUnavailableError: if Redis is being left alone.
        """
        if self._failures < self._most:
            return False
        with self._lock:
            left = self._again_at - monotonic()
            if left <= 0:
                # This caller probes; the others are refused till it has an answer.
                self._set_pause()
        if left > 0:
            raise StoreUnavailableError(
                f"Redis cannot be reached: it has not answered {self._failures} times in a row, "
                f"and is asked again in {left:.1f} s"
            )
        return True

    def record_success(self) -> None:
        """Redis has answered, be it with an error."""
        if self._failures:
            self._failures = 0
            self._pause = 0.0

    def record_failure(self) -> None:
        """It has not."""
        with self._lock:
            self._failures += 1
            if self._failures == self._most:
                self._set_pause()

    def _set_pause(self) -> None:
        # A little off, so that a fleet of workers does not ask as one.
        self._pause = min(self._pause * 2 or FIRST_PAUSE, self._longest_pause)
        self._again_at = monotonic() + self._pause * random.uniform(0.75, 1.0)
