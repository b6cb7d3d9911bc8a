"""Finds where a body is: file, line and function of its frames, without values and source lines.

The heartbeat calls `observe` after each request, and `celery inspect` calls `stack_of`.
"""

from __future__ import annotations

import faulthandler
import logging
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import get_ident
from typing import Any

from celery_idempotent.core.clock import lease_now
from celery_idempotent.core.events.report import log_apart, log_extra
from celery_idempotent.core.lease import Lease
from celery_idempotent.core.printable import one_line

logger = logging.getLogger(__name__)

#: The frames that are kept at each end of a longer stack: those of the body and its callees are at
#: the outer end, and what it waits for is at the inner one.
KEPT = 6
#: Paths of the packages whose frames are left out; this one is the first.
_LEFT_OUT = tuple(
    f"{Path(str(spec.origin)).parent}/"
    for spec in map(find_spec, ("celery_idempotent", "celery", "billiard"))
    if spec is not None
)
#: One call in a stack: file, line and function.
_Frame = tuple[str, str, str]
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\S+) in (.*)$', re.MULTILINE)


def observe(
    leases: Sequence[Lease], note: Callable[[Sequence[Lease], list[str]], object] | None
) -> None:
    """Passes `leases`, which are of one thread, and the stack of their body to `note`.

    It also logs an execution that has lasted for ten of its leases, and then each time that its
    duration has doubled. A long execution is not an error (a time limit would end it), so the level
    is INFO.
    """
    now = lease_now()
    long = [lease for lease in leases if lease.log_due <= now]
    if note is None and not long:
        return
    lines = stack_of(leases[0])
    if note is not None:
        note(leases, lines)
    for lease in long:
        lease.log_due = 2 * now - lease.started_at
    for lease in long[:1]:
        others = f" and {len(long) - 1} others" if len(long) > 1 else ""  # of a batch
        log_apart(
            *(logger, logging.INFO, "The execution of %s%s has lasted %.0f s, and is at %s"),
            *(lease.key, others, now - lease.started_at, " > ".join(lines) or "an unknown place"),
            extra=log_extra(lease.key, token=lease.token),
        )


def stack_of(lease: Lease) -> list[str]:
    """Returns ``file:line function`` of the body's frames, the innermost last.

    The first is that of the body. A ``with`` block is not a function of its own: for it, the
    innermost frames of the thread are returned. Empty if the thread or the greenlet has ended, or
    the greenlet runs in another thread.
    """
    # With gevent or eventlet, this thread is the body's own: both are greenlets in it.
    frames = [] if lease.thread == get_ident() else _frames_of_thread(lease.thread)
    frames = frames or _frames_of_greenlet(lease.greenlet())
    ours = (n for n, (file, *_) in enumerate(frames) if file.startswith(_LEFT_OUT[0]))
    body = next(ours, max(0, len(frames) - 2 * KEPT))
    lines = [
        one_line(f"{file}:{line} {function}")
        for file, line, function in frames[body:]
        if not file.startswith(_LEFT_OUT)
    ]
    return lines if len(lines) <= 2 * KEPT else [*lines[:KEPT], "…", *lines[-KEPT:]]


def _frames_of_greenlet(greenlet: Any) -> list[_Frame]:
    """Returns the frames of a greenlet of this thread, which is suspended, the innermost last."""
    frame, frames = getattr(greenlet, "gr_frame", None), list[_Frame]()
    while frame is not None:
        frames.append((frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return frames[::-1]


def _frames_of_thread(thread: int) -> list[_Frame]:
    """Returns the frames of another thread, at most a hundred, the innermost last.

    ``sys._current_frames`` makes frame objects of running functions, with which Python 3.11 may
    crash or deadlock; ``faulthandler`` only reads. Without a GIL neither is safe.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return []
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        dump = file.read().decode("utf-8", "backslashreplace")
    for part in dump.split("\n\n"):
        head, _, rest = part.strip().partition("\n")
        if (found := _THREAD.match(head)) and int(found[1], 16) == thread:
            return [(frame[1], frame[2], frame[3]) for frame in _FRAME.finditer(rest)][::-1]
    return []
