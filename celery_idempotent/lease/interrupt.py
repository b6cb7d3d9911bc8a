"""Raises an error in a thread, or greenlet, that runs a task."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from celery_idempotent.clock import monotonic

#: Seconds that `disarm` waits at most for an error that is being raised.
LONGEST_WAIT = 1.0


class Interrupt:
    """Lets the heartbeat raise `error` in the thread, or greenlet, that creates this.

    Python raises it in a thread between two bytecodes; the hub raises it in a greenlet that waits.
    Code that waits in C is interrupted when it returns.
    """

    def __init__(self, error: type[BaseException]) -> None:
        self._raise = _gevent(error) or _eventlet(error) or _thread(error)
        # The first to take it decides whether the error is raised. Not a lock: one that a signal
        # handler leaves locked would block the heartbeat.
        self._turn = deque((None,))
        self._raised = False

    def trigger(self) -> None:
        """Raises it, unless `disarm` came first."""
        if self._take_turn():
            self._raise(self._delivered)

    def disarm(self) -> None:
        """Raises nothing from now on.

        An error that is being raised at this moment is raised here.
        """
        if self._take_turn():
            return
        give_up_at = monotonic() + LONGEST_WAIT
        while not self._raised and monotonic() < give_up_at:
            time.sleep(0)

    def _take_turn(self) -> bool:
        try:
            self._turn.pop()
        except IndexError:
            return False
        return True

    def _delivered(self) -> None:
        self._raised = True


#: Raises the error, and calls the given function when it is sure to arrive.
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
