"""The records in Redis: commands, the scripts that execute them, and the transports to the server.

Callers build a command with `commands` and pass it to `record_store.RecordStore`. Apart from
`testing`, only this package imports redis-py.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs `coroutine`, which must never suspend, and returns its result.

    Blocking and asyncio code share their coroutines. With a blocking transport, these block where
    they would suspend on an event loop.

    Raises:
        RuntimeError: if the coroutine waits for an event loop.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise RuntimeError("run_sync was given a coroutine that waits for an event loop")
