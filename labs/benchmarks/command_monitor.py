"""Counts the commands that clients send to a server."""

from __future__ import annotations

import threading
from collections import Counter

from tests.servers.redis_server import RedisServer

_END_MARK = "end of monitoring"


class CommandMonitor:
    """Counts commands by name in its ``with`` block, by MONITOR.

    Commands that scripts run are not counted; ``INFO commandstats`` would include them.
    """

    def __init__(self, server: RedisServer) -> None:
        self.commands: Counter[str] = Counter()
        self._client = server.client()
        self._thread = threading.Thread(target=self._monitor, daemon=True)
        self._started = threading.Event()

    def __enter__(self) -> CommandMonitor:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        # All earlier commands have been counted once this one is received.
        self._client.echo(_END_MARK)
        self._thread.join()
        self._client.close()

    def _monitor(self) -> None:
        with self._client.monitor() as monitor:
            self._started.set()
            for entry in monitor.listen():
                if _END_MARK in entry["command"]:
                    return
                if entry["client_type"] != "lua":
                    self.commands[entry["command"].split(" ", 1)[0].lower()] += 1
