"""The clock that leases go by."""

from __future__ import annotations

import time
from collections.abc import Callable


def _clock() -> Callable[[], float]:
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    if boottime is None:
        return time.monotonic
    try:
        time.clock_gettime(boottime)
    except OSError:  # a kernel, or a sandbox, that does not have it
        return time.monotonic
    return lambda: time.clock_gettime(boottime)


#: Seconds, never set back. On Linux they go on while the machine is suspended: a lease that ends
#: meanwhile is over when it wakes up. ``time.monotonic`` stands still there.
monotonic = _clock()
