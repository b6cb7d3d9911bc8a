"""Raises an error inside a thread that is busy running a task."""

from __future__ import annotations

import ctypes
import threading


class Interrupt:
    """Lets another thread raise `error` in the thread that creates this.

    Python delivers it between two bytecodes: code that waits in C hears of it when it comes back.
    """

    def __init__(self, error: type[BaseException]) -> None:
        self._thread = threading.get_ident()
        self._error = error
        self._lock = threading.Lock()
        self._over = False

    def strike(self) -> None:
        """Raise it, unless the protected part is over."""
        with self._lock:
            if not self._over:
                _raise_in(self._thread, self._error)

    def over(self) -> None:
        """The protected part has ended; from now on nothing is raised."""
        with self._lock:
            self._over = True


def _raise_in(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
