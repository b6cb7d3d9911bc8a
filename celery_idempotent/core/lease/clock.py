"""The clock of leases."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from celery_idempotent.core.clock import monotonic as process_clock

#: Seconds; never set back. On Linux, this clock also counts the time for which the machine is
#: suspended: a lease that expires meanwhile has expired when the machine resumes.
#: ``time.monotonic`` stops during a suspension.
lease_now: Callable[[], float]
try:
    lease_now = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    lease_now()
except (AttributeError, OSError):  # some kernels and sandboxes lack this clock
    lease_now = process_clock
