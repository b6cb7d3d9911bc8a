"""What a process says of a store that cannot be asked: one loud line at its start, one at its end.

An outage meets every message that comes meanwhile, again and again. A line for each at level ERROR
would bury whatever else the log has to say.
"""

from __future__ import annotations

import logging
from time import monotonic

from celery_idempotent.store.config import StoreConfig

logger = logging.getLogger(__name__)


class OutageLogger:
    """One for each store and process; a call or two may be miscounted among threads."""

    def __init__(self, config: StoreConfig) -> None:
        self._place = config
        self.failed_calls = 0
        self._since = 0.0

    def another_call(self) -> bool:
        """A call could not ask; whether it is the first."""
        self.failed_calls += 1
        if self.failed_calls > 1:
            return False
        self._since = monotonic()
        return True

    def end(self) -> None:
        """A call has had its answer."""
        if not self.failed_calls:
            return
        calls, self.failed_calls = self.failed_calls, 0
        if calls > 1:
            logger.warning(
                "The store of idempotent tasks is back after %.1f s: %s; %d calls could not ask it",
                monotonic() - self._since,
                self._place,
                calls,
            )
