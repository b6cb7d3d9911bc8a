"""The worker that this process belongs to; a module that imports nothing, for cheap reads."""

from typing import Any

#: Its `SharedCounters`, set by `shared_counters.start`; None in programs that are not workers.
counters: Any = None
