"""The worker that this process belongs to; a module that imports nothing, for cheap reads."""

from typing import Any

#: The worker's `SharedCounters`. `shared_counters.start` sets it; None in a program that is not a
#: worker.
counters: Any = None
