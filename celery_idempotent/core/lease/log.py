"""Log lines of the heartbeat, each in a thread of its own.

A body that is stuck in a handler of the log, such as one that writes to a full pipe, has the
handler's lock. A heartbeat that waited for the lock would let the leases expire.
"""

from __future__ import annotations

import threading
from logging import Logger
from typing import Any


def log_apart(logger: Logger, level: int, message: str, *args: Any, **options: Any) -> None:
    """Logs as ``logger.log`` does, without waiting for it."""
    threading.Thread(
        target=logger.log,
        args=(level, message, *args),
        kwargs=options,
        name="idempotency-log",
        daemon=True,
    ).start()
