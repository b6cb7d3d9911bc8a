"""Keeps a soft time limit out of the flow: it is for the body alone.

Celery's prefork pool raises SoftTimeLimitExceeded from a handler of SIGUSR1, in the main thread and
between any two bytecodes: while a begin is under way whose answer is then lost, or while a result
is stored. So the gate puts a handler of its own around the one that it finds. It calls that one at
once, always; only what it raises waits where the flow, not the body, is at work.
"""

from __future__ import annotations

import signal
import threading
from _thread import get_ident
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

_SIGNAL = getattr(signal, "SIGUSR1", None)
# What is behind signal.getsignal: that takes 2 µs to find out that a function is no enum.
_handler_of = getattr(signal.getsignal, "__wrapped__", signal.getsignal)

#: Phases, by what becomes of a limit that strikes: it waits until somebody asks for it; it ends the
#: waiting for the store, as Interrupted; it is raised as it is.
FLOW, WAIT, BODY = "flow", "wait", "body"


class Interrupted(BaseException):
    """A limit has struck before the work began: there is no outcome yet.

    Args:
        error: what the signal's handler has raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class SoftLimit:
    """What a soft time limit does to one flow, or to one message from its start to its end."""

    def __init__(self) -> None:
        self.phase = FLOW
        #: What has struck, and waits.
        self.error: BaseException | None = None
        self._thread = get_ident()
        self._around: SoftLimit | None = None

    def enter(self) -> None:
        """A limit that strikes from now on meets this one."""
        _watch()
        self._around = _current.get()
        _current.set(self)

    def leave(self) -> None:
        """It meets again what it met before; a second call does nothing."""
        if _current.get() is self:
            _current.set(self._around)

    def begin(self, phase: str) -> None:
        """Enter `phase`, unless a limit has struck by then.

        Raises:
            Interrupted: if one has.
        """
        try:
            self.phase = phase
            if self.error is not None:
                raise Interrupted(self.error)
        except Interrupted:
            self.phase = FLOW
            raise
        except BaseException as error:
            self.phase = FLOW
            raise Interrupted(error) from None

    def take(self) -> BaseException | None:
        """What has struck; once."""
        error, self.error = self.error, None
        return error


_current: ContextVar[SoftLimit | None] = ContextVar("idempotent_soft_limit", default=None)

#: Gives the limit of the message under way, where no flow is: its task has not reached the gate
#: yet, or has left it.
of_message: Callable[[], SoftLimit | None] | None = None


def current() -> SoftLimit | None:
    """The limit that is in force here; none in a thread that has only inherited the context."""
    limit = _current.get()
    return limit if limit is not None and limit._thread == get_ident() else None  # noqa: SLF001


class _Handler:
    """Calls `handler`, and keeps what it raises from the flow."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._handler = handler

    def __call__(self, number: int, frame: Any) -> None:
        limit = current() or (of_message() if of_message else None)
        if limit is None or limit.phase is BODY:
            self._handler(number, frame)
            return
        try:
            self._handler(number, frame)
        except BaseException as error:
            limit.error = error.with_traceback(None)
            if limit.phase is WAIT:
                limit.phase = FLOW
                raise Interrupted(limit.error) from None


def _watch() -> None:
    """Stand around the handler that is installed now, if one is."""
    if _SIGNAL is None or get_ident() != threading.main_thread().ident:
        return  # nobody is struck in another thread
    handler = _handler_of(_SIGNAL)
    if type(handler) is not _Handler and callable(handler):
        signal.signal(_SIGNAL, _Handler(handler))
