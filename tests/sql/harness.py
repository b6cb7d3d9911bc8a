"""A worker whose tasks write into a database."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from celery import Celery
from celery.result import AsyncResult

from tests.apps import close
from tests.servers.redis_server import RedisServer
from tests.sql.databases import TestDatabase
from tests.sql.shop import breakpoint_of, starts_of
from tests.waiting import SOON, eventually
from tests.worker.harness import WorkerProcess, end_workers


class Shop:
    """Workers, the database that they write into, and files by which the test controls them.

    Args:
        database_url: how the workers reach the database, if not directly.
        concurrency: the pool size of each worker.
        options: of each worker's command.
        settings: of their app.
    """

    def __init__(
        self,
        server: RedisServer,
        database: TestDatabase,
        library: str,
        directory: Path,
        *,
        database_url: str | None = None,
        workers: int = 1,
        concurrency: int = 4,
        lease: float = 20.0,
        options: Sequence[Sequence[str]] = (),
        **settings: Any,
    ) -> None:
        self.server, self.database = server, database
        self.breakpoints = directory / "breakpoints"
        self.breakpoints.mkdir()
        with server.client() as client:
            client.flushall()
        self.app = Celery(broker=server.url, backend=server.url, set_as_current=False)
        environment = {
            "SHOP_REDIS": server.url,
            "SHOP_DATABASE": database_url or database.url,
            "SHOP_LIBRARY": library,
            "SHOP_BREAKPOINTS": str(self.breakpoints),
            "SHOP_LEASE": str(lease),
            "SHOP_SETTINGS": json.dumps(settings),
        }
        self.workers = [
            WorkerProcess(
                f"{directory.name}-{library}-{database.kind}-{number}",
                ("--concurrency", f"{concurrency}", *(options[number] if options else ())),
                environment,
                directory / f"worker-{number}.log",
                app="tests.sql.shop",
            )
            for number in range(workers)
        ]

    def charge(self, order: str, end: str = "return", name: str = "charge", **options: Any) -> Any:
        """Publishes a charge."""
        return self.app.send_task(f"sql_shop.{name}", (order,), {"end": end}, **options)

    def was_killed(self, order: str, point: str) -> bool:
        """Returns whether a process was killed there."""
        return not breakpoint_of(self.breakpoints, order, point).exists()

    def hold(self, order: str) -> None:
        """Lets the executions of `order` wait, after their effect, until :meth:`release`."""
        breakpoint_of(self.breakpoints, order, "held").touch()

    def release(self, order: str) -> None:
        """Lets them continue."""
        breakpoint_of(self.breakpoints, order, "held").unlink()

    def starts(self, order: str) -> int:
        """Returns the number of executions that have started."""
        path = starts_of(self.breakpoints, order)
        return len(path.read_text().splitlines()) if path.exists() else 0

    def start(self, order: str, **options: Any) -> AsyncResult:
        """Charges `order`, and returns when it runs; it waits until it is released."""
        self.hold(order)
        result = self.charge(order, **options)
        self.wait_for_start(order)
        return result

    def wait_for_start(self, order: str, number: int = 1) -> None:
        """Waits until so many executions have started."""
        eventually(lambda: self.starts(order) >= number, f"execution {number} has started")

    def assert_charged_once(self, order: str, *calls: AsyncResult, starts: int | None = 1) -> None:
        """These calls and another one have the receipt of the execution that was committed."""
        receipts = {call.get(timeout=SOON) for call in (*calls, self.charge(order))}
        assert len(receipts) == 1, receipts
        assert self.database.effects(order) == 1
        assert starts in (None, self.starts(order)), "how many executions have started"

    def wait_for_log(self, text: str) -> None:
        """Waits until a worker has logged `text`."""
        eventually(lambda: text in self.logs(), f"a worker logs {text!r}")

    def logs(self) -> str:
        """Returns the output of all workers."""
        return "".join(worker.logs() for worker in self.workers)

    def __enter__(self) -> Shop:
        for worker in self.workers:
            worker.ready()
        return self

    def __exit__(self, *_: object) -> None:
        end_workers(self.workers)
        close(self.app)
        print(self.logs())


StartShop = Callable[..., Shop]
