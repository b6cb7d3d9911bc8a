"""relier's worker app, and a publisher: both run in an environment with relier alone.

``python -m labs.redelivery.relier_app RATE LONGEST`` publishes until it is terminated, and
prints the ids.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from typing import Any

from celery.signals import worker_init
from redis import Redis
from relier import rl_task
from relier.tasks.app import celery_app as app
from relier.tasks.context import TaskContext

from tests.servers.program import die_with_parent

worker_init.connect(die_with_parent)
_clients: dict[int, Redis] = {}


@rl_task(idempotent=True, name="redelivery.work")
async def work(number: str, seconds: float, ctx: TaskContext) -> None:
    """Records its start and works for `seconds`."""
    client = _clients.setdefault(os.getpid(), Redis.from_url(app.conf.broker_url))
    client.rpush(f"starts:{ctx.task_id}", time.time())
    await asyncio.sleep(seconds)
    client.set(f"ended:{ctx.task_id}", 1)


async def publish(rate: float, longest: float) -> None:
    """Publishes calls at a steady rate."""
    task: Any = work
    while True:
        await asyncio.sleep(random.expovariate(rate))
        number = str(time.time_ns())
        receipt = await task.apush(number=number, seconds=random.uniform(0, longest))
        print(receipt.id, flush=True)


if __name__ == "__main__":
    asyncio.run(publish(*map(float, sys.argv[1:])))
