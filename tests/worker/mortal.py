"""Workers that end with the tests."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # from Linux's <sys/prctl.h>


def die_with_parent(**_: object) -> None:
    """Let Linux end the worker with the tests. The pool ends with the worker, by Celery's care."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
