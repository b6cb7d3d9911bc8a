"""The ledger: an append-only file in which workers record their executions and messages.

It does not depend on any server with an outage. Lost and duplicate executions are counted by it and
by the results of callers, never by the library's own records.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Ledger:
    """Written by several processes, one line per write; read at the end of a run.

    Args:
        path: an existing file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, event: str, **details: Any) -> None:
        """Appends a line."""
        os.write(self._file, json.dumps({"event": event, **details}).encode() + b"\n")

    def read(self, event: str) -> Iterator[dict[str, Any]]:
        """Yields the details of all events of that name, in the order of their writes."""
        with self._path.open(encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                if line.pop("event") == event:
                    yield line

    def changed_at(self) -> float:
        """Returns the time of the last write, in seconds since the epoch."""
        return self._path.stat().st_mtime

    def close(self) -> None:
        """Closes the file for writing."""
        os.close(self._file)
