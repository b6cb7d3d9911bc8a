"""A circuit breaker: in an outage a call fails in microseconds instead of after a timeout.

While the breaker is closed, every command is sent. Two failures in a row open it, and commands
fail at once. After a delay, one caller sends a PING, which may take half a second; all other
commands still fail at once. The delay doubles with each failed PING.

Circuit breaker libraries do not fit: they hold a lock while a command runs, which serializes the
callers, and they probe with the next caller's command and its whole timeout.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

from celery_idempotent.core.clock import monotonic
from celery_idempotent.errors import StoreUnavailableError

#: Consecutive failures that open the breaker.
THRESHOLD = 2
#: Seconds before the first probe; maximum seconds between two probes.
FIRST_DELAY, MAX_DELAY = 1.0, 30.0
#: Seconds that a probe may take.
PROBE_TIMEOUT = 0.5


class Breaker:
    """One for each server and process.

    It has no lock, which a forked child could inherit locked: two threads at the same moment may
    count one failure, or probe twice.

    Args:
        probe: sends a PING.
        node: the server's name in errors, if it is a node of a cluster.
    """

    def __init__(self, probe: Callable[[], Awaitable[None]], node: str = "") -> None:
        self._probe = probe
        self._name = f"The Redis node {node}" if node else "Redis"
        self._delay = 0.0
        self._probe_at = 0.0
        #: Consecutive.
        self.failures = 0
        #: Whether commands fail without being sent.
        self.open = False

    async def check(self) -> None:
        """Returns if commands may be sent; probes first if the breaker is open and a probe is due.

        Raises:
            StoreUnavailableError: if the breaker is open and no probe is due, or the probe failed.
        """
        if not self.open:
            return
        if self.failures < THRESHOLD:
            self.open = False  # a reply arrived while another thread was opening it
            return
        remaining = self._probe_at - monotonic()
        if remaining <= 0:
            self._set_delay()  # commands of other callers fail until the probe has ended
        if remaining > 0:
            raise StoreUnavailableError(
                f"{self._name} cannot be reached: it has not replied {self.failures} times in a "
                f"row; the next attempt is in {remaining:.1f} s"
            )
        try:
            await self._probe()
        except StoreUnavailableError:
            self.record_failure()
            raise
        self.record_success()

    def record_success(self) -> None:
        """Closes the breaker: Redis has replied, possibly with an error."""
        self.failures = 0
        self.open = False
        self._delay = 0.0

    def record_failure(self, number: int = 1) -> None:
        """Counts commands without a reply, and opens the breaker at the threshold."""
        self.failures += number
        if self.failures >= THRESHOLD and not self.open:
            self.open = True
            self._set_delay()

    def _set_delay(self) -> None:
        self._delay = min(self._delay * 2 or FIRST_DELAY, MAX_DELAY)
        # Randomly shorter, so that the workers of a fleet do not probe at the same moment.
        self._probe_at = monotonic() + self._delay * random.uniform(0.75, 1.0)
