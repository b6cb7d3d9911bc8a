"""Adds a broadcast queue to the app; the JSON settings cannot contain one."""

from __future__ import annotations

from kombu import Queue
from kombu.common import Broadcast

from tests.worker import shop

EVERYONE = "everyone"

if shop.app is not None:
    shop.app.conf.task_queues = [Queue("celery"), Broadcast(EVERYONE)]
