"""The description of an outage: its servers, how it begins, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tests.worker.harness import WorkerProcess


class Deployment:
    """The servers of one run; leaving the ``with`` block stops them.

    A subclass starts them in :meth:`start` and enters each into `self.servers`.
    """

    #: The worker, once it has started.
    worker: WorkerProcess

    def __init__(self) -> None:
        self.servers = ExitStack()

    def start(self) -> Mapping[str, Any]:
        """Starts the servers; returns the app's settings for them."""
        raise NotImplementedError

    def inject(self) -> None:
        """Begins the outage."""
        raise NotImplementedError

    def heal(self) -> None:
        """Ends the outage; returns when the store replies again."""
        raise NotImplementedError

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        self.servers.close()


class Repeater:
    """Calls `action` every `interval` seconds until it is stopped."""

    def __init__(self, action: Callable[[], object], interval: float) -> None:
        self._action = action
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            self._action()

    def stop(self) -> None:
        """Stops the calls; waits for one that is running."""
        self._stopped.set()
        self._thread.join()


@dataclass(frozen=True, kw_only=True, eq=False)
class Outage:
    """One outage: a row of the table."""

    name: str
    #: For the table.
    title: str
    deployment: type[Deployment]
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Its duration, in seconds.
    seconds: float = 4.0
    #: Whether it begins before the worker starts.
    at_start: bool = False
    #: Whether it includes the broker, which may lose messages.
    affects_broker: bool = False
    #: Why keys may be executed twice, with different results; empty if they may not.
    may_execute_twice: str = ""
    #: Why callers may get an error; empty if they may not.
    may_raise: str = ""
