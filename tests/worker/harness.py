"""Real Celery workers, each a process group of its own, and the shop that they work for.

Workers are nodes of pytest-celery, so tests speak its language (``worker.kill()``,
``worker.wait_for_log()``, ``worker.restart()``). Where pytest-celery expects a Docker container,
there is a :class:`WorkerProcess`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from celery import Celery
from pytest_celery import CeleryTestWorker
from redis import Redis

from celery_idempotent.testing.server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.ledger import Ledger
from tests.worker.shop import SETTINGS_VARIABLE, make_app

REPOSITORY = Path(__file__).resolve().parents[2]

STOP_SECONDS = 15.0
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")

#: To the whole group. Other signals go to the worker, which ends its pool by itself.
FOR_ALL = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)


#: Broker options: the messages of a dead worker are handed out again after 3 to 4 seconds.
SOON_VISIBLE = {
    "visibility_timeout": 3,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}


class WorkerProcess:
    """``celery worker`` with its pool: what pytest-celery asks of a container."""

    def __init__(
        self,
        name: str,
        options: tuple[str, ...],
        environment: Mapping[str, str],
        log: Path,
        app: str = "tests.worker.shop",
    ) -> None:
        self.name = self.id = name
        self._command = [
            *(sys.executable, "-m", "celery", "-q", "-A", app),
            *("worker", "--hostname", f"{name}@here", "--loglevel", "INFO", *QUIET, *options),
        ]
        self._environment = {**os.environ, **environment}
        self._log = log
        self.start()

    def start(self) -> None:
        """Start it; :meth:`ready` waits until it takes messages."""
        self._stopping = False
        self._log.touch()
        self._said_before = len(self.logs())
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                self._command,
                cwd=REPOSITORY,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def status(self) -> str:
        """Docker's words for whether it runs."""
        return "running" if self.process.poll() is None else "exited"

    def ready(self) -> bool:
        """Wait until it takes messages."""
        sign = f"{self.name}@here ready."
        eventually(
            lambda: self.status == "exited" or sign in self.logs()[self._said_before :],
            f"worker {self.name} is ready; it says: {self.logs()}",
        )
        assert self.status == "running", f"worker {self.name} has ended; it says: {self.logs()}"
        return True

    def logs(self) -> str:
        """All that it has printed since it was first started."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal; after SIGKILL, wait for the end."""
        number = _number_of(signal)
        if number in FOR_ALL:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        if number == _number_of("SIGKILL"):
            self.process.wait(STOP_SECONDS)

    def reload(self) -> None:
        """Docker's clients keep a copy of a container's state. This does not."""

    def restart(self, timeout: float = STOP_SECONDS) -> None:
        """Stop it, if it runs, and start it again."""
        self.stop(timeout)
        self.start()
        self.ready()

    def ask_to_stop(self) -> None:
        """Begin a warm shutdown, as an operator would."""
        if self.status == "running" and not self._stopping:
            self._stopping = True
            self.kill("SIGCONT")
            self.kill("SIGTERM")

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """A warm shutdown; a hard one if that takes too long."""
        self.ask_to_stop()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill("SIGKILL")

    teardown = stop


class Worker(CeleryTestWorker):
    """A worker under test."""

    container: WorkerProcess
    _told = 0

    def freeze(self) -> None:
        """Stop the clock for the worker and its pool (SIGSTOP)."""
        self.kill("SIGSTOP")

    def thaw(self) -> None:
        """Let them go on as if nothing had happened (SIGCONT)."""
        self.kill("SIGCONT")

    def children(self) -> list[int]:
        """Process ids of the pool."""
        (stats,) = self.app.control.inspect([f"{self.name()}@here"]).stats().values()
        return stats["pool"]["processes"]

    def wait_for_log(self, log: str, message: str = "", timeout: float = SOON) -> None:
        """Wait until it has printed `log`; pytest-celery's own looks once a second."""
        eventually(lambda: log in self.logs(), message or f"{self.name()} logs {log!r}", timeout)

    def news(self) -> str:
        """What it has printed since this was last asked."""
        logs = self.logs()
        start, self._told = self._told, len(logs)
        return logs[start:]

    def wait_for_exit(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self.container.process.wait(SOON)


class Shop:
    """A broker, the app as its customers have it, and the workers.

    Args:
        server: holds messages, results, records and the ledger; each shop has databases of its own.
        directory: for the workers' logs.
        settings: of the Celery app, in customers and workers alike; written as JSON.
    """

    _databases = count(0, 2)

    def __init__(self, server: RedisServer, directory: Path, **settings: Any) -> None:
        database = next(self._databases)
        url = server.url.rpartition("/")[0]
        self.settings = {
            "broker_url": f"{url}/{database}",
            "result_backend": f"{url}/{database}",
            "broker_connection_retry_on_startup": True,
            "shop_ledger": f"{url}/{database + 1}",
            **settings,
        }
        self.redis = Redis.from_url(f"{url}/{database}")
        self._directory = directory
        self.workers: list[Worker] = []
        self.app: Celery = make_app(self.settings)
        self.ledger = Ledger.of(self.app)

    def start_worker(
        self, *options: str, concurrency: int = 2, ready: bool = True, **environment: str
    ) -> Worker:
        """Start a worker, and wait until it takes messages.

        Args:
            options: more of them for ``celery worker``.
            ready: False does not wait, for a worker that will not come up.
            environment: variables that it has besides those of the tests.
        """
        name = f"{self._directory.name}-{len(self.workers) + 1}"
        process = WorkerProcess(
            name,
            ("--concurrency", str(concurrency), *options),
            {SETTINGS_VARIABLE: json.dumps(self.settings), **environment},
            self._directory / f"{name}.log",
        )
        worker = Worker(process, self.app)
        self.workers.append(worker)
        if ready:
            worker.ready()
        return worker

    def messages(self, queue: str = "celery") -> int:
        """How many messages the broker has, delivered and not acknowledged ones included."""
        return self.redis.llen(queue) + self.redis.hlen("unacked")

    def wait_until_empty(self) -> None:
        """Wait until the broker has no message left."""
        eventually(lambda: self.messages() == 0, "the broker has no message left")

    def print_logs(self) -> None:
        """Print what the workers said since last time; pytest shows it under a test that failed."""
        for worker in self.workers:
            print(f"--- worker {worker.name()} ---", worker.news(), sep="\n")

    def __enter__(self) -> Shop:
        self.app.set_current()
        return self

    def __exit__(self, *_: object) -> None:
        self.ledger.release_all()
        for worker in self.workers:
            worker.container.ask_to_stop()
        for worker in self.workers:
            worker.teardown()
        self.print_logs()
        self.redis.close()
        self.app.close()
        # A result that a failed test still holds must not ask a server that is gone.
        if consumer := getattr(self.app.backend, "result_consumer", None):
            consumer.subscribed_to.clear()
            consumer._pubsub = None


def _number_of(name: str | int) -> int:
    return getattr(signal, name) if isinstance(name, str) else name
