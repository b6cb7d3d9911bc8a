"""Raises an error inside a thread, or a greenlet, that is busy running a task."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable


class Interrupt:
    """Lets the heartbeat raise `error` in whoever creates this.

    In a thread Python delivers it between two bytecodes; in a greenlet the hub does, when the
    greenlet waits. Code that waits in C hears of it when it comes back.
    """

    def __init__(self, error: type[BaseException]) -> None:
        self._raise = _gevent(error) or _eventlet(error) or _thread(error)
        self._lock = threading.Lock()
        self._over = False

    def strike(self) -> None:
        """Raise it, unless the protected part is over."""
        with self._lock:
            if not self._over:
                self._raise(lambda: self._over)

    def over(self) -> None:
        """The protected part has ended; from now on nothing is raised."""
        with self._lock:
            self._over = True


#: Raises, unless the function that it is given says that it is too late by then.
_Raise = Callable[[Callable[[], bool]], None]


def _thread(error: type[BaseException]) -> _Raise:
    ident = threading.get_ident()

    def strike(too_late: Callable[[], bool]) -> None:
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(ident), ctypes.py_object(error))

    return strike


def _gevent(error: type[BaseException]) -> _Raise | None:
    if "gevent.monkey" not in sys.modules:
        return None
    import gevent

    if not gevent.monkey.is_module_patched("threading"):
        return None
    greenlet, loop = gevent.getcurrent(), gevent.get_hub().loop

    def strike(too_late: Callable[[], bool]) -> None:
        loop.run_callback(lambda: None if too_late() else greenlet.throw(error))

    return strike


def _eventlet(error: type[BaseException]) -> _Raise | None:
    if "eventlet.patcher" not in sys.modules:
        return None
    import eventlet
    from eventlet import hubs, patcher

    if not patcher.is_monkey_patched("thread"):
        return None
    greenlet, hub = eventlet.getcurrent(), hubs.get_hub()

    def strike(too_late: Callable[[], bool]) -> None:
        hub.schedule_call_global(0, lambda: None if too_late() else greenlet.throw(error))

    return strike
