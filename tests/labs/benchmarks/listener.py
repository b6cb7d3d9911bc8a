"""Listens to a server, and counts what clients send it."""

from __future__ import annotations

import threading
from collections import Counter

from celery_idempotent.testing.server import RedisServer

_END = "the ear leaves"


class Ear:
    """In the ``with`` block, counts commands by name; those that a script runs are not counted.

    ``INFO commandstats`` would count both alike.
    """

    def __init__(self, server: RedisServer) -> None:
        self.commands: Counter[str] = Counter()
        self._client = server.client()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._hears = threading.Event()

    def __enter__(self) -> Ear:
        self._thread.start()
        self._hears.wait()
        return self

    def __exit__(self, *_: object) -> None:
        # What was sent before this one has been heard when this one is.
        self._client.echo(_END)
        self._thread.join()
        self._client.close()

    def _listen(self) -> None:
        with self._client.monitor() as monitor:
            self._hears.set()
            for heard in monitor.listen():
                if _END in heard["command"]:
                    return
                if heard["client_type"] != "lua":
                    self.commands[heard["command"].split(" ", 1)[0].lower()] += 1
