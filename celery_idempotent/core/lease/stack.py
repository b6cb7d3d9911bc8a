"""Where a body is: file, line and function of its frames, without values and source lines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from threading import get_ident
from types import FrameType

from celery_idempotent.core.events.report import log_extra
from celery_idempotent.core.lease.clock import lease_now
from celery_idempotent.core.lease.lease import Lease
from celery_idempotent.core.lease.log import log_apart
from celery_idempotent.core.printable import one_line

logger = logging.getLogger(__name__)

#: The frames that are kept at each end of a longer stack: those of the body and its callees are at
#: the outer end, and what it waits for is at the inner one.
KEPT = 6
#: Packages whose frames are left out.
_INFRASTRUCTURE = ("celery_idempotent", "celery", "billiard")


def observe(leases: Sequence[Lease], note: Callable[[Sequence[Lease], list[str]], object]) -> None:
    """Notes where the body of these leases, which are of one thread, is.

    Logs it once an execution has lasted for ten of its leases, then each time that has doubled. A
    long execution is no error, so the level is INFO: a time limit is what ends it.
    """
    lines = stack_of(leases[0])
    note(leases, lines)
    now = lease_now()
    long = [lease for lease in leases if lease.logged_at <= now]
    for lease in long:
        lease.logged_at = 2 * now - lease.started_at
    for lease in long[:1]:
        others = f" and {len(long) - 1} others" if len(long) > 1 else ""  # of a batch
        log_apart(
            *(logger, logging.INFO, "The execution of %s%s has lasted %.0f s, and is at %s"),
            *(lease.key, others, now - lease.started_at, " > ".join(lines) or "an unknown place"),
            extra=log_extra(lease.key, token=lease.token),
        )


def stack_of(lease: Lease) -> list[str]:
    """Returns ``file:line function`` of the body's frames, the innermost last.

    They begin with the body, if this package has called it; a block is a part of its caller.
    Empty if the thread has ended, or the greenlet runs in another thread.
    """
    # The heartbeat of a patched process is a greenlet, which has the thread of the body's.
    own = lease.thread == get_ident()
    frame = None if own else sys._current_frames().get(lease.thread)  # noqa: SLF001 (documented)
    if frame is None and lease.greenlet is not None:
        frame = lease.greenlet.gr_frame
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    frames.reverse()
    packages = [str(each.f_globals.get("__name__")).partition(".")[0] for each in frames]
    is_called = "celery_idempotent" in packages
    body = packages.index("celery_idempotent") if is_called else max(0, len(frames) - 2 * KEPT)
    lines = [
        one_line(f"{each.f_code.co_filename}:{each.f_lineno} {each.f_code.co_name}")
        for each, package in zip(frames[body:], packages[body:], strict=True)
        if package not in _INFRASTRUCTURE
    ]
    return lines if len(lines) <= 2 * KEPT else [*lines[:KEPT], "…", *lines[-KEPT:]]
