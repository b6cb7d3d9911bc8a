"""Publishes a canvas, in spite of cut connections or in a process that is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from celery.signals import after_task_publish

from labs.canvases.app import make_app
from labs.canvases.shapes import shapes


def persist(publish: Callable[[], Any]) -> Any:
    """Publishes again if the connection is cut meanwhile, as callers do."""
    while True:
        try:
            return publish()
        except (OSError, ConnectionError):
            time.sleep(0.05)
        except Exception as error:
            if "onnection" not in f"{type(error).__name__} {error}":
                raise
            time.sleep(0.05)


def publish_and_die(
    settings: dict[str, Any], seed: int, name: str, kind: str, messages: int
) -> None:
    """Publishes the canvas, and kills this process after so many messages."""
    sent = 0

    def count(**_: Any) -> None:
        nonlocal sent
        sent += 1
        if sent == messages:
            os.kill(os.getpid(), signal.SIGKILL)

    after_task_publish.connect(count)
    persist(shapes(make_app(settings), seed, name)[kind].publish)
