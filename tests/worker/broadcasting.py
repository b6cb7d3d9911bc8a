"""A broadcast queue for the shop's workers; JSON cannot carry one in the settings."""

from __future__ import annotations

from kombu import Queue
from kombu.common import Broadcast

from tests.worker import shop

EVERYONE = "everyone"

if shop.app is not None:
    shop.app.conf.task_queues = [Queue("celery"), Broadcast(EVERYONE)]
