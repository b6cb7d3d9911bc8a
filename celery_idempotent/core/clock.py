"""The clocks of this machine: `monotonic` for timeouts, `lease_now` for leases.

Neither is ever set back. The server's clock is in `core.store.clock`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

#: Returns seconds. A partial, so that libraries that freeze time in tests (freezegun) do not
#: replace the function: with a frozen clock, a timeout would never end.
monotonic = partial(time.monotonic)


#: Returns seconds. On Linux, this clock also counts the time for which the machine is suspended, so
#: a lease that expires meanwhile has expired when the machine resumes; `monotonic` stops meanwhile.
lease_now: Callable[[], float]
try:
    lease_now = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    lease_now()
except (AttributeError, OSError):  # some kernels and sandboxes lack this clock
    lease_now = monotonic
