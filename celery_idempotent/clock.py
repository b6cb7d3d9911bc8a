"""The clock of timeouts and delays."""

from __future__ import annotations

import time
from functools import partial

#: Seconds; never set back. A partial, so that libraries which freeze the time in tests (freezegun)
#: do not find and replace the function: a frozen clock would end no timeout.
monotonic = partial(time.monotonic)
