"""The worker that this process belongs to."""

from typing import Any

#: Its `SharedCounters`; None in other programs.
counters: Any = None
