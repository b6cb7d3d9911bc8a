"""The environment of one contestant in one scenario: databases, an app and a worker."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery import Celery, Task
from celery.result import AsyncResult
from redis import Redis

from labs.comparison.app import NAME, make_app
from labs.comparison.contestants import find_contestant
from labs.rig.worker import SETTINGS_VARIABLE
from tests.waiting import SOON, eventually
from tests.worker.harness import WorkerProcess, end_workers
from tests.worker.ledger import Ledger

#: The database of all locks and records, and of nothing else.
LOCKS_DATABASE = 0
#: Broker, result backend and ledger of one environment.
DATABASES_EACH = 3


@dataclass(frozen=True)
class PublishError:
    """The error that a publish raised."""

    error: Exception

    @property
    def name(self) -> str:
        return type(self.error).__name__


class Environment:
    """An app; its ``with`` block runs a worker.

    Args:
        server: URL of the server.
        number: unique among the environments of a server; selects its databases.
        concurrency: processes in the worker's pool; 0 starts no worker.
        lock: duration of locks or leases, in seconds.
        broker: URL of the broker's server, if it has one of its own.
        worker: unique among the environments with the same number.
        settings: of the Celery app, in addition to the contestant's.
        task_options: of every task, in addition to the contestant's.
    """

    def __init__(
        self,
        contestant: str,
        server: str,
        number: int,
        *,
        concurrency: int = 4,
        lock: float = 60.0,
        broker: str = "",
        worker: int = 0,
        settings: dict[str, Any] | None = None,
        task_options: dict[str, Any] | None = None,
    ) -> None:
        url = server.rpartition("/")[0]
        self._database = 1 + number * DATABASES_EACH
        broker_url, backend, ledger = (
            f"{url}/{self._database + offset}" for offset in range(DATABASES_EACH)
        )
        if broker:
            broker_url = f"{broker.rpartition('/')[0]}/{self._database}"
        #: Of the app.
        self.settings: dict[str, Any] = {
            "broker_url": broker_url,
            "result_backend": backend,
            "broker_connection_retry_on_startup": True,
            "lab_contestant": contestant,
            "lab_locks": f"{url}/{LOCKS_DATABASE}",
            "lab_lock": lock,
            "lab_ledger": ledger,
            "lab_options": task_options or {},
            **(settings or {}),
        }
        self._python = find_contestant(contestant).python
        self.app: Celery = make_app(self.settings)
        self.ledger = Ledger(ledger)
        self._broker = Redis.from_url(broker_url)
        self._concurrency = concurrency
        self.worker: WorkerProcess | None = None
        self._node = f"environment-{number}-{worker}"
        self._directory = tempfile.TemporaryDirectory(prefix="peers-")

    @property
    def environment(self) -> dict[str, str]:
        """The variables of other processes with its app."""
        return {SETTINGS_VARIABLE: json.dumps(self.settings)}

    def task(self, name: str) -> Task:
        """Returns the contestant's task of that name."""
        return self.app.tasks[f"peers.{name}"]

    @staticmethod
    def order() -> str:
        """Returns a new order; executions are counted by order."""
        return uuid4().hex

    def publish(self, task: str, *args: Any, **options: Any) -> AsyncResult | PublishError:
        """Calls ``apply_async``; returns its result or its error."""
        try:
            return self.task(task).apply_async(args, **options)
        except Exception as error:
            return PublishError(error)

    def start(self, seconds: float) -> str:
        """Publishes a call and returns its order when it runs."""
        order = self.order()
        self.publish("work", order, seconds)
        self.ledger.wait_for_run(order)
        return order

    def drop_broker_connections(self) -> None:
        """Lets the server close every connection to the broker."""
        with Redis.from_url(self.settings["lab_ledger"]) as client:
            for connection in client.client_list():
                if int(connection["db"]) == self._database:
                    client.client_kill_filter(_id=connection["id"])

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all processes of the worker."""
        os.killpg(self.worker_pid, number)

    @property
    def worker_pid(self) -> int:
        """The main process of the worker, which leads a process group."""
        assert self.worker is not None
        return self.worker.process.pid

    def messages(self) -> int:
        """Returns the number of messages in the broker, unacknowledged ones included."""
        return self._broker.llen("celery") + self._broker.hlen("unacked")

    def settled(self) -> bool:
        """Whether neither the broker nor the worker has a message left.

        The worker is inspected too, because the broker no longer lists a copy of a message that
        was acknowledged. What it has scheduled is in the broker, or has been woken and has ended.
        """
        if self.messages():
            return False
        inspect = self.app.control.inspect([f"{self._node}@here"], timeout=5.0, limit=1)
        for list_tasks in (inspect.active, inspect.reserved):
            tasks = list_tasks()
            if not tasks or any(tasks.values()):
                return False
        return not self.messages()

    def wait_until_settled(self, seconds: float = SOON) -> None:
        """Waits until no message is left."""
        eventually(self.settled, "all messages are processed", seconds)

    # The worker.

    def __enter__(self) -> Environment:
        if self._concurrency:
            self.worker = WorkerProcess(
                self._node,
                ("--concurrency", str(self._concurrency)),
                self.environment,
                Path(self._directory.name) / "worker.log",
                app=NAME,
                python=self._python,
            )
            self.worker.ready()
        return self

    def __exit__(self, *_: object) -> None:
        if self.worker is not None:
            end_workers([self.worker])
        self._broker.close()
        self.app.close()
        self._directory.cleanup()

    def log(self) -> str:
        """Returns the output of the worker."""
        return self.worker.logs() if self.worker else ""

    def restart_exited(self) -> bool:
        """Starts the worker again if it has exited; returns whether it has."""
        assert self.worker is not None
        exited = self.worker.status == "exited"
        if exited:
            self.worker.start()
            self.worker.ready()
        return exited
