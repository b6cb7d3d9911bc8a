"""A broker, the worker that lives, and those that have faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redis import Redis

from labs.redelivery.app import NAME, make_app
from labs.rig.site import Site
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually
from tests.worker.harness import WorkerProcess

SURVIVOR = "survivor@here"


class RedeliverySite(Site):
    """The Redis of broker, records and notes, and a worker that lives through all trials.

    Args:
        settings: of the app, in addition.
        server: that Redis; by default a new one.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        folder: Path | None = None,
        server: RedisServer | None = None,
    ) -> None:
        super().__init__(NAME, folder)
        url = (server or self.server()).url
        self.redis = Redis.from_url(url, decode_responses=True)
        self.callback(self.redis.close)
        own = {"broker_url": url, "lab_url": url, "worker_redirect_stdouts": False}
        self.settings |= {**own, **settings}
        self.app: Any = make_app(self.settings)
        self.start("survivor", "idle", "--pool", "threads", "--concurrency", "60")

    def start(self, name: str, queue: str, *options: str, **settings: Any) -> WorkerProcess:
        """Starts a worker and waits until it is ready."""
        worker = self.worker(name, "--queues", queue, *options, **settings)
        worker.ready()
        return worker

    def publish(self, queue: str, number: str, seconds: float, **options: Any) -> str:
        """Publishes a call of `seconds`; returns its task id."""
        work = self.app.tasks["redelivery.work"]
        return str(work.apply_async((number, seconds), queue=queue, **options).id)

    def let_survivor_consume(self, queue: str) -> None:
        """Lets the living worker take what is in a queue."""
        self.app.control.add_consumer(queue, destination=[SURVIVOR])

    def have(self, what: str, task_ids: Any) -> bool:
        """Whether each task is noted as `deliveries`, `starts` or `ended`."""
        return all(self.redis.exists(f"{what}:{task_id}") for task_id in task_ids)

    def wait_until_received(self, number: int) -> None:
        """Waits until workers hold so many messages."""
        eventually(lambda: self.redis.zcard("unacked_index") == number, "all are received")
