"""Confines soft time limits to the body of a task.

Celery's prefork pool raises SoftTimeLimitExceeded in a handler of SIGUSR1: in the main thread,
between any two bytecodes. It could interrupt a begin, whose reply would be lost, or the storing of
a result. Therefore the flow wraps the handler, which the pool installs only after
``worker_process_init``. The wrapper always calls the handler at once, and keeps an error that it
raises outside the body. If that was before the body, it is raised in place of the body; after the
body, or without one, it is dropped.
"""

from __future__ import annotations

import signal
import threading

# From `_signal`: signal.getsignal converts the handler to an enum if it can, which takes 3 µs.
from _signal import getsignal  # type: ignore[import-not-found]
from _thread import get_ident
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

_SIGNAL = getattr(signal, "SIGUSR1", None)


@dataclass(slots=True, eq=False)
class SoftLimit:
    """The soft time limit of one flow, or of one message from its start to its end."""

    #: Whether the body is running: then an error of the handler is raised there, and not kept.
    in_body: bool = False
    #: The error that the handler has raised outside the body, until it is raised or dropped.
    error: BaseException | None = None
    #: The thread that has created it: a context may be copied to another one.
    _thread: int = field(default_factory=get_ident, init=False)
    #: The limit of the enclosing call, which `leave` makes current again.
    _outer: SoftLimit | None = field(default=None, init=False)

    def enter(self) -> None:
        """Makes this the current limit of the thread, and wraps the installed handler."""
        self._outer = _current.get()
        _current.set(self)
        if _SIGNAL is None or get_ident() != threading.main_thread().ident:
            return  # handlers run in the main thread
        handler = getsignal(_SIGNAL)
        if type(handler) is not _Handler and callable(handler):
            signal.signal(_SIGNAL, _Handler(handler))

    def leave(self) -> None:
        """Makes the outer limit current again. A second call does nothing."""
        if _current.get() is self:
            _current.set(self._outer)

    def begin_body(self) -> None:
        """Begins the body; raises the kept error, if there is one."""
        self.in_body = True
        error, self.error = self.error, None
        if error is not None:
            raise error


_current: ContextVar[SoftLimit | None] = ContextVar("idempotent_soft_limit", default=None)

#: Returns the limit that was entered last: that of the current flow.
innermost: Callable[[], SoftLimit] = _current.get  # type: ignore[assignment]


#: Returns the limit of the current message, for a task that is not in the flow; set by
#: :mod:`celery_idempotent.core.task.receive.host`.
of_message: Callable[[], SoftLimit | None] | None = None


def current() -> SoftLimit | None:
    """Returns the current limit of this thread; None if it belongs to another thread's context."""
    limit = _current.get()
    return limit if limit is not None and limit._thread == get_ident() else None  # noqa: SLF001


class _Handler:
    """The signal handler that wraps the installed one, and keeps its errors out of the flow."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._handler = handler

    def __call__(self, number: int, frame: Any) -> None:
        limit = current() or (of_message() if of_message else None)
        if limit is None or limit.in_body:
            self._handler(number, frame)
            return
        try:
            self._handler(number, frame)
        except BaseException as error:
            limit.error = error.with_traceback(None)
