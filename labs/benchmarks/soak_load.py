"""The processes beside the workers of the soak test: a publisher and a web application.

``python -m labs.benchmarks.soak_load`` publishes at a steady rate; ``api`` is an ASGI application
that publishes a message for each request. Both have the app of :mod:`labs.comparison.app`, whose
contestant is in the environment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from uuid import uuid4

from redis import Redis
from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from celery_idempotent import Idempotency
from celery_idempotent.contrib.asgi import IdempotencyMiddleware, anonymous
from labs.comparison.app import app
from labs.comparison.contestants import OURS
from tests.servers.program import die_with_parent

#: Messages per second that the publisher publishes, if the worker keeps up.
RATE = 100
#: Messages in the queue at which the publisher waits.
BACKLOG = 400
#: One call in this many is a duplicate.
DUPLICATES = 4

assert app is not None
task = app.tasks["peers.no_op"]
die_with_parent()


def orders() -> Iterator[str]:
    """Yields orders, one of them again and again."""
    while True:
        yield "duplicate"
        for _ in range(DUPLICATES - 1):
            yield uuid4().hex


async def publish(request: Request) -> JSONResponse:
    """Publishes a message, in another thread, since Celery blocks."""
    result = await asyncio.to_thread(task.delay, request.path_params["order"])
    return JSONResponse({"id": result.id}, 202)


api = Starlette(routes=[Route("/orders/{order}", publish, methods=["POST"])])
if app.conf.lab_contestant == OURS.name:
    engine = Idempotency(app, name="soak", result_ttl=app.conf.idempotency_result_ttl)
    api.add_middleware(IdempotencyMiddleware, idem=engine, identity=anonymous)


def main() -> None:
    """Publishes until it is killed."""
    broker = Redis.from_url(app.conf.broker_url)
    calls = orders()
    due = time.monotonic()
    while True:
        due = max(due + 0.5, time.monotonic() - 0.5)
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            if broker.llen("celery") < BACKLOG:
                for _ in range(RATE // 2):
                    task.delay(next(calls))
        except (RedisError, task.OperationalError):
            continue  # during a fault


if __name__ == "__main__":
    main()
