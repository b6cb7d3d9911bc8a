"""Where one contestant goes through one scenario: databases, an app and a worker of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery import Celery, Task
from celery.result import AsyncResult
from redis import Redis

from tests.labs.comparison.app import PLAN_VARIABLE, Plan, make_app
from tests.labs.comparison.ledger import Ledger
from tests.waiting import SOON, eventually

REPOSITORY = Path(__file__).parents[3]

STOP_SECONDS = 10.0
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")

#: The database of all locks and records. Nothing else is in it.
LOCKS_DATABASE = 0
#: Broker, result backend and ledger of an arena.
DATABASES_EACH = 3


@dataclass(frozen=True)
class Refusal:
    """What a caller got instead of a result."""

    error: Exception

    @property
    def name(self) -> str:
        return type(self.error).__name__


class Environment:
    """An app, and in the ``with`` block its worker.

    Args:
        server: URL of the server.
        number: no two arenas on a server share one.
        concurrency: processes in the worker's pool; 0 starts no worker.
        lock: seconds that a lock, or a lease, lasts.
        settings: of the Celery app, besides the contestant's own.
        task_options: of every task, besides the contestant's own.
    """

    def __init__(
        self,
        contestant: str,
        server: str,
        number: int,
        *,
        concurrency: int = 4,
        lock: float = 60.0,
        settings: dict[str, Any] | None = None,
        task_options: dict[str, Any] | None = None,
    ) -> None:
        url = server.rpartition("/")[0]
        self._database = 1 + number * DATABASES_EACH
        broker, backend, ledger = (
            f"{url}/{self._database + place}" for place in range(DATABASES_EACH)
        )
        self.plan = Plan(
            contestant,
            broker,
            backend,
            f"{url}/{LOCKS_DATABASE}",
            ledger,
            lock,
            settings or {},
            task_options or {},
        )
        self.contestant = contestant
        self.lock = lock
        self.app: Celery = make_app(self.plan)
        self.ledger = Ledger(ledger)
        self._broker = Redis.from_url(broker)
        self._concurrency = concurrency
        self._worker: subprocess.Popen[bytes] | None = None
        self._node = f"arena-{number}@peers"
        self._directory = tempfile.TemporaryDirectory(prefix="peers-")
        self._log = Path(self._directory.name) / "worker.log"

    # What scenarios do.

    def task(self, name: str) -> Task:
        """The contestant's task of that name."""
        return self.app.tasks[f"peers.{name}"]

    @staticmethod
    def order() -> str:
        """An order that nothing has had before; scenarios count by it."""
        return uuid4().hex

    def publish(self, task: str, *args: Any, **options: Any) -> AsyncResult | Refusal:
        """``apply_async``, or what it raised."""
        try:
            return self.task(task).apply_async(args, **options)
        except Exception as error:
            return Refusal(error)

    def drop_broker_connections(self) -> int:
        """Close, from the server's side, every connection to the broker; how many there were."""
        with Redis.from_url(self.plan.ledger) as client:
            doomed = [
                connection["id"]
                for connection in client.client_list()
                if int(connection["db"]) == self._database
            ]
            return sum(client.client_kill_filter(_id=number) for number in doomed)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the worker, all its processes, for the ``with`` block."""
        assert self._worker is not None
        os.killpg(self._worker.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._worker.pid, signal.SIGCONT)

    # What scenarios ask.

    def messages(self) -> int:
        """How many the broker has, delivered and not acknowledged ones included."""
        return self._broker.llen("celery") + self._broker.hlen("unacked")

    def settled(self) -> bool:
        """Whether nothing is left to do: no message in the broker, and none with the worker.

        The worker is asked too, because a copy of a message that was acknowledged is in no list of
        the broker's any more.
        """
        if self.messages():
            return False
        inspect = self.app.control.inspect([self._node], timeout=5.0, limit=1)
        for ask in (inspect.active, inspect.reserved, inspect.scheduled):
            answer = ask()
            if not answer or any(answer.values()):
                return False
        return not self.messages()

    def wait_until_settled(self, seconds: float = SOON) -> None:
        """Wait until nothing is left to do."""
        eventually(self.settled, "nothing is left to do", seconds)

    # The worker.

    def __enter__(self) -> Environment:
        if self._concurrency:
            self._start_worker()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_worker()
        self._broker.close()
        self.app.close()
        self._directory.cleanup()

    def log(self) -> str:
        """All that the worker has printed."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def output_tail(self) -> str:
        """The end of it."""
        return "\n".join(self.log().splitlines()[-30:])

    def _start_worker(self) -> None:
        command = [
            *(sys.executable, "-m", "celery", "-A", "tests.labs.comparison.app", "worker"),
            *("--hostname", self._node, "--concurrency", str(self._concurrency)),
            *("--loglevel", "INFO", *QUIET),
        ]
        with self._log.open("wb") as log:
            self._worker = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, PLAN_VARIABLE: self.plan.write()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        eventually(self._is_ready, f"the worker is ready; it says: {self.output_tail()}")

    def _is_ready(self) -> bool:
        assert self._worker is not None
        if self._worker.poll() is not None:
            raise RuntimeError(f"the worker has ended: {self.output_tail()}")
        return f"{self._node} ready." in self.log()

    def _stop_worker(self) -> None:
        """A hard end, of the whole group: the scenario is over, and nobody waits for the rest."""
        if self._worker is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._worker.pid, signal.SIGKILL)
        self._worker.wait(STOP_SECONDS)
