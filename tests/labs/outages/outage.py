"""An outage: which servers there are, how they are struck, and how they come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any


class Stage:
    """The servers of one run; leaving the ``with`` block ends them.

    A subclass starts them in :meth:`open`, each entered into `self.servers`.
    """

    def __init__(self) -> None:
        self.servers = ExitStack()

    def open(self) -> Mapping[str, Any]:
        """Start the servers; what the app must be told of them."""
        raise NotImplementedError

    def trigger(self) -> None:
        """Begin the outage."""
        raise NotImplementedError

    def mend(self) -> None:
        """End it; returns when the store answers again."""
        raise NotImplementedError

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.servers.close()


class Again:
    """Does `blow` again and again, `pause` seconds apart, until it is stopped."""

    def __init__(self, blow: Callable[[], object], pause: float) -> None:
        self._blow = blow
        self._pause = pause
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(self._pause):
            self._blow()

    def stop(self) -> None:
        """Once more at most, then no more."""
        self._over.set()
        self._thread.join()


@dataclass(frozen=True, kw_only=True, eq=False)
class Outage:
    """A row of the table."""

    name: str
    #: As the table has it.
    title: str
    stage: type[Stage]
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: How long it lasts, in seconds.
    seconds: float = 4.0
    #: Whether it is there before the worker is.
    at_start: bool = False
    #: Whether the broker goes with it, and may lose messages of its own.
    strikes_broker: bool = False
    #: Why keys may be executed twice, and their callers see different results; empty: they may not.
    may_double: str = ""
    #: Why callers may get an error; empty: they may not.
    may_tell: str = ""
