"""The clock of leases."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from celery_idempotent.clock import monotonic as process_clock

#: Seconds; never set back. On Linux the clock includes the time for which the machine is suspended,
#: so that a lease which expires meanwhile has expired when the machine resumes. ``time.monotonic``
#: stops there.
monotonic: Callable[[], float]
try:
    monotonic = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    monotonic()
except (AttributeError, OSError):  # some kernels and sandboxes do not have it
    monotonic = process_clock
