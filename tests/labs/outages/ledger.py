"""The ledger: what really happened, line by line, as the workers themselves tell it.

A file that is only appended to: no server whose outage is struck has a part in it. What is lost or
doubled is judged by it and by what callers can see, never by the library's own records.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Ledger:
    """Written by any number of processes, a whole line at a time; read when all is over.

    Args:
        path: of a file that is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, what: str, **details: Any) -> None:
        """Append a line."""
        os.write(self._file, json.dumps({"what": what, **details}).encode() + b"\n")

    def read(self, what: str) -> Iterator[dict[str, Any]]:
        """The lines about `what`, in the order in which they were written."""
        with self._path.open(encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                if line.pop("what") == what:
                    yield line

    def changed_at(self) -> float:
        """When the last line was written (seconds since the epoch)."""
        return self._path.stat().st_mtime

    def close(self) -> None:
        """Write no more."""
        os.close(self._file)
