"""The clock of timeouts and delays."""

from __future__ import annotations

import time
from functools import partial

#: Seconds; never set back. A partial, so that libraries that freeze time in tests (freezegun) do
#: not replace the function: a frozen clock would never end a timeout.
monotonic = partial(time.monotonic)
