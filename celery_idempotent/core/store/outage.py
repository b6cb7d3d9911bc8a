"""Limits the log of an outage to its first call, one line a minute, and one when it ends.

During an outage, every delivery of every message fails: a line for each would hide all others.
"""

from __future__ import annotations

import logging

from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.events.repeats import Repeats

logger = logging.getLogger(__name__)


class OutageLogger:
    """One for each server and process; threads may miscount by a call or two.

    Args:
        server: its name for log lines, without a password.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        #: In this outage.
        self.failed_calls = 0
        self._since = 0.0
        self._repeats = Repeats()

    def count_failure(self) -> int | None:
        """Counts a call without a reply, or with an error.

        Returns how many earlier calls its line stands for; None: do not log it.
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
