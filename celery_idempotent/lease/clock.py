"""The clock of leases."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial


def _clock() -> Callable[[], float]:
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    if boottime is None:
        return time.monotonic
    try:
        time.clock_gettime(boottime)
    except OSError:  # some kernels and sandboxes do not have it
        return time.monotonic
    return partial(time.clock_gettime, boottime)


#: Seconds; never set back. On Linux the clock includes the time for which the machine is suspended,
#: so that a lease which expires meanwhile has expired when the machine resumes. ``time.monotonic``
#: stops there.
monotonic: Callable[[], float] = _clock()
