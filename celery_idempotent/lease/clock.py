"""The clock of leases."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from celery_idempotent.clock import monotonic as process_clock


def _clock() -> Callable[[], float]:
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    if boottime is None:
        return process_clock
    try:
        time.clock_gettime(boottime)
    except OSError:  # some kernels and sandboxes do not have it
        return process_clock
    return partial(time.clock_gettime, boottime)


#: Seconds; never set back. On Linux the clock includes the time for which the machine is suspended,
#: so that a lease which expires meanwhile has expired when the machine resumes. ``time.monotonic``
#: stops there.
monotonic: Callable[[], float] = _clock()
