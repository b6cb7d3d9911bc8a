"""The circuit breaker and the log of outages, one of each for every server that has records.

`RecordStore` checks the breaker before each command, and records replies and failures in it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable

from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.events.report import Repeats
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.errors import StoreUnavailableError

logger = logging.getLogger(__name__)

#: Consecutive failures that open the breaker.
THRESHOLD = 2
#: Seconds before the first probe; maximum seconds between two probes.
FIRST_DELAY, MAX_DELAY = 1.0, 30.0
#: Seconds that a probe may take.
PROBE_TIMEOUT = 0.5


class Breaker:
    """Makes a call fail in microseconds during an outage, instead of after a timeout.

    While the breaker is closed, every command is sent. Two failures in a row open it, and commands
    fail at once. After a delay, one caller sends a PING, which may take half a second; all other
    commands still fail at once. The delay doubles with each failed PING.

    Circuit breaker libraries do not fit: they hold a lock while a command runs, which serializes
    the callers, and they probe with the next caller's command and its whole timeout.

    There is one for each server and process. It has no lock, which a forked child could inherit
    locked: two threads at the same moment may count one failure, or probe twice.

    Args:
        probe: sends a PING.
        node: the server's name in errors, if it is a node of a cluster.
    """

    def __init__(self, probe: Callable[[], Awaitable[None]], node: str = "") -> None:
        self._probe = probe
        self._name = f"The Redis node {node}" if node else "Redis"
        #: Seconds between the last two probes, and when the next is due (seconds of `monotonic`).
        self._delay = 0.0
        self._probe_at = 0.0
        #: How many commands in a row have got no reply.
        self.failures = 0
        #: Whether commands fail at once, without being sent, until a probe gets a reply.
        self.open = False

    async def check(self) -> None:
        """Returns if commands may be sent; probes first if the breaker is open and a probe is due.

        Raises:
            StoreUnavailableError: if the breaker is open and no probe is due, or the probe failed.
        """
        if not self.open:
            return
        if self.failures < THRESHOLD:
            self.open = False  # another thread reset `failures` while this one opened the breaker
            return
        remaining = self._probe_at - monotonic()
        if remaining <= 0:
            self._set_delay()  # first, so that other callers fail at once instead of probing too
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


class OutageLogger:
    """Limits the log of an outage to its first call, one line a minute, and one when it ends.

    During an outage, every delivery of every message fails: a line for each would hide all others.
    One for each server and process; threads may miscount by a call or two.

    Args:
        server: its name for log lines, without a password.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        #: Number of failed calls in the current outage; 0 without one.
        self.failed_calls = 0
        self._since = 0.0
        self._repeats = Repeats()

    def count_failure(self) -> int | None:
        """Counts a call that got no reply, or an error.

        Returns the number of earlier failures that were not logged, for the line about this one;
        None if this one is not to be logged either.
        """
        self.failed_calls += 1
        if self.failed_calls == 1:
            self._since, self._repeats = monotonic(), Repeats()
        return self._repeats.left_out(None)

    def end(self) -> None:
        """Records that a call got its reply."""
        if not self.failed_calls:
            return
        calls, self.failed_calls = self.failed_calls, 0
        if calls > 1:
            logger.warning(
                "The store of idempotent tasks is back after %.1f s: %s; "
                "%d calls could not reach it",
                monotonic() - self._since,
                self._server,
                calls,
            )


class Node:
    """A single server, a node of a cluster, or the cluster while the node of a record is unknown.

    Its state is not shared between processes, since one may reach a server that another cannot.

    Args:
        name: host and port of a cluster's node; else empty.
        probe: sends a PING to the node of this name.
    """

    def __init__(
        self, config: StoreConfig, name: str, probe: Callable[[str], Awaitable[None]]
    ) -> None:
        self.breaker = Breaker(lambda: probe(name), name)
        self.outage = OutageLogger(f"{config}, node {name}" if name else str(config))
