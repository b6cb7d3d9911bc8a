"""Publishes a canvas, in spite of cut connections or in a process that is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from celery.signals import after_task_publish, before_task_publish

from labs.canvases.app import make_app
from labs.canvases.shapes import shapes

#: Seconds for a publish to succeed; no fault lasts as long.
PUBLISH_TIMEOUT = 60.0


def persist(publish: Callable[[], Any], timeout: float = PUBLISH_TIMEOUT) -> Any:
    """Publishes again if the connection is cut meanwhile, as callers do.

    Raises:
        TimeoutError: if the connection still fails after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return publish()
        except Exception as error:
            text = f"{type(error).__name__} {error}"
            if not isinstance(error, OSError) and "onnection" not in text:
                raise
            if time.monotonic() > deadline:
                raise TimeoutError(f"not published for {timeout:g} s: {text}") from error
            time.sleep(0.05)


def publish_and_die(
    settings: dict[str, Any], seed: int, name: str, kind: str, messages: int
) -> None:
    """Publishes the canvas, and kills this process after so many messages; 0: before the first."""
    sent = 0

    def count(**_: Any) -> None:
        nonlocal sent
        sent += 1
        if sent >= messages:
            os.kill(os.getpid(), signal.SIGKILL)

    (after_task_publish if messages else before_task_publish).connect(count)
    persist(shapes(make_app(settings), seed, name)[kind].publish)
