"""Waits until servers have agreed with each other."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.servers.program import ServerError

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
