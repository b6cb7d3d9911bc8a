"""Ends workers with the tests."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # from Linux's <sys/prctl.h>


def die_with_parent(**_: object) -> None:
    """Lets Linux kill the worker when the tests end; Celery then ends the pool."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
