"""The clocks of timeouts and of leases."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

#: Seconds; never set back. A partial, so that libraries that freeze time in tests (freezegun) do
#: not replace the function: a frozen clock would never end a timeout.
monotonic = partial(time.monotonic)


#: Seconds; never set back. On Linux, this clock also counts the time for which the machine is
#: suspended: a lease that expires meanwhile has expired when the machine resumes.
#: ``time.monotonic`` stops during a suspension.
lease_now: Callable[[], float]
try:
    lease_now = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    lease_now()
except (AttributeError, OSError):  # some kernels and sandboxes lack this clock
    lease_now = monotonic
