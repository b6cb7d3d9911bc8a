"""Tasks that need a person: each is one incident of the alert rules."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

from celery_idempotent.lease.heartbeat import heartbeat
from tests.waiting import eventually
from tests.worker.tasks import handle, task_of


def kill_process(self: Any, order: str) -> None:
    """Kills its process, each time."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_heartbeat(self: Any, order: str) -> int:
    """Ends the heartbeat's thread, as a defect in it would; returns the id of the process."""
    renewer = heartbeat.renewer(self.idempotency_configuration.executor.store)
    thread = renewer.thread
    assert thread is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    )
    renewer._wake.put(None)  # the error is raised once the thread runs
    eventually(lambda: not thread.is_alive(), "the heartbeat's thread has ended")
    return os.getpid()


crash_looping = task_of(kill_process, "crash_looping", idempotency_max_attempts=7)
heartless = task_of(kill_heartbeat, "heartless")
#: Tasks like others, so that each incident has a task of its own.
unsaved = task_of(handle, "unsaved", idempotency_lease=4.0)
unreadable = task_of(handle, "unreadable")
orphaned = task_of(handle, "orphaned")
slow = task_of(handle, "slow")
