"""Raises an error inside a thread, or a greenlet, that is busy running a task."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

#: Seconds, at most, that the end of the protected part waits for an error on its way to it.
LONGEST_WAIT = 1.0


class Interrupt:
    """Lets the heartbeat raise `error` in whoever creates this.

    In a thread Python delivers it between two bytecodes; in a greenlet the hub does, when the
    greenlet waits. Code that waits in C hears of it when it comes back.
    """

    def __init__(self, error: type[BaseException]) -> None:
        self._raise = _gevent(error) or _eventlet(error) or _thread(error)
        # Whoever takes it first decides whether the error is raised. Not a lock: one that a signal
        # leaves locked would stop the heartbeat.
        self._turn = deque((None,))
        self._struck = False

    def trigger(self) -> None:
        """Raise it, unless the protected part is over."""
        if self._take_turn():
            self._raise(self._delivered)

    def disarm(self) -> None:
        """The protected part has ended; from now on nothing is raised.

        An error that is on its way at this moment is raised here.
        """
        if self._take_turn():
            return
        give_up_at = time.monotonic() + LONGEST_WAIT
        while not self._struck and time.monotonic() < give_up_at:
            time.sleep(0)

    def _take_turn(self) -> bool:
        try:
            self._turn.pop()
        except IndexError:
            return False
        return True

    def _delivered(self) -> None:
        self._struck = True


#: Raises, and calls the function that it is given when the error is sure to arrive.
_Raise = Callable[[Callable[[], None]], None]


def _thread(error: type[BaseException]) -> _Raise:
    ident = threading.get_ident()

    def trigger(delivered: Callable[[], None]) -> None:
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(ident), ctypes.py_object(error))
        delivered()

    return trigger


def _gevent(error: type[BaseException]) -> _Raise | None:
    if "gevent.monkey" not in sys.modules:
        return None
    import gevent

    if not gevent.monkey.is_module_patched("threading"):
        return None
    greenlet, loop = gevent.getcurrent(), gevent.get_hub().loop

    def trigger(delivered: Callable[[], None]) -> None:
        def throw() -> None:
            delivered()
            greenlet.throw(error)

        loop.run_callback(throw)

    return trigger


def _eventlet(error: type[BaseException]) -> _Raise | None:
    if "eventlet.patcher" not in sys.modules:
        return None
    import eventlet
    from eventlet import hubs, patcher

    if not patcher.is_monkey_patched("thread"):
        return None
    greenlet, hub = eventlet.getcurrent(), hubs.get_hub()

    def trigger(delivered: Callable[[], None]) -> None:
        def throw() -> None:
            delivered()
            greenlet.throw(error)

        hub.schedule_call_global(0, throw)

    return trigger
