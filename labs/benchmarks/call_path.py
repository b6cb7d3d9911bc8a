"""``python -m labs.benchmarks.call_path``: counts the functions that one call enters.

A profile hook counts them in an eager call, after a first call has connected to Redis. A coroutine
that is resumed counts again. ``--list`` prints the functions in order.
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from celery import Celery

import celery_idempotent
from celery_idempotent import IdempotentTask
from tests.servers.redis_server import RedisServer

PACKAGE = Path(celery_idempotent.__file__).parent


class CallPath:
    """Records the functions that are entered in its ``with`` block, in order."""

    def __init__(self) -> None:
        #: Those of the package.
        self.functions: list[tuple[Path, str]] = []
        #: All functions in Python that were entered, the package's included.
        self.entered = 0

    def __enter__(self) -> CallPath:
        sys.setprofile(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, _: Any) -> None:
        self.entered += event == "call"
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            self.functions.append((path.relative_to(PACKAGE), frame.f_code.co_qualname))

    @property
    def files(self) -> int:
        return len({path for path, _ in self.functions})

    @property
    def folder_changes(self) -> int:
        folders = [path.parent for path, _ in self.functions]
        return sum(before != after for before, after in pairwise(folders))

    def __str__(self) -> str:
        return (
            f"{len(self.functions)} calls, {self.files} files, {self.folder_changes} folder changes"
        )


def measure() -> dict[str, CallPath]:
    """Returns the paths of a call that runs and of a call that is replayed."""
    with RedisServer.start() as server:
        app = Celery("path", broker=server.url, backend=server.url, set_as_current=False)

        @app.task(base=IdempotentTask)
        def charge(order: int) -> int:
            return order

        charge.apply((0,))
        with CallPath() as run:
            charge.apply((1,))
        with CallPath() as replay:
            charge.apply((1,))
        app.close()
    return {"run": run, "replay": replay}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every function")
    arguments = parser.parse_args()
    for name, path in measure().items():
        print(f"{name}: {path}")
        if arguments.list:
            print(*(f"  {file}: {function}" for file, function in path.functions), sep="\n")
