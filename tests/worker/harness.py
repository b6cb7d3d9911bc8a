"""Real Celery workers, each in its own process group, and the app that they run.

Workers are nodes of pytest-celery, with its methods (``worker.kill()``, ``worker.wait_for_log()``,
``worker.restart()``), but with a :class:`WorkerProcess` instead of a Docker container.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import urlopen
from uuid import uuid4

from celery import Celery
from celery.result import AsyncResult
from pytest_celery import CeleryTestWorker
from redis import Redis

from celery_idempotent.core.store import commands
from tests.apps import close
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.forking import ForkedCelery
from tests.worker.ledger import Ledger, ReceivedSignal, Run
from tests.worker.shop import SETTINGS_VARIABLE, make_app

REPOSITORY = Path(__file__).resolve().parents[2]

STOP_SECONDS = 15.0
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")

#: Signals for the whole process group; others go to the main process, which stops its pool.
GROUP_SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)


#: Broker options: unacknowledged messages are redelivered after 3 to 4 seconds.
FAST_REDELIVERY = {
    "visibility_timeout": 3,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}

#: Settings with which the broker redelivers the messages of a living worker, too.
COPIED_MESSAGES = {"broker_transport_options": FAST_REDELIVERY, "idempotency_redeliver_after": None}

#: Settings for workers that are killed with `FAST_REDELIVERY`. A worker prefetches no copy while
#: it runs a task: kombu loses a message if its receiver is killed between BRPOP and the note that
#: the message is unacknowledged.
KILLED_WORKERS = {"broker_transport_options": FAST_REDELIVERY, "worker_prefetch_multiplier": 1}

#: Settings for workers that lose their Redis broker. Celery 5.7 ends a worker that has messages if
#: the loss shows first in the connection of remote control ("Unrecoverable error", AttributeError).
#: A worker that may prefetch no more messages reads nothing, and does not see the loss at all.
LOST_BROKER = {"worker_enable_remote_control": False, "worker_prefetch_multiplier": 16}


#: The log line of a message that has ended without a decision.
BYPASSED = "has succeeded without a decision"


class WorkerProcess:
    """``celery worker`` with its pool, with the interface of a pytest-celery container."""

    def __init__(
        self,
        name: str,
        options: tuple[str, ...],
        environment: Mapping[str, str],
        log: Path,
        app: str = "tests.worker.shop",
        directory: Path = REPOSITORY,
        python: str = sys.executable,
    ) -> None:
        self.name = self.id = name
        # Not `-m celery`, which Celery cannot start again after SIGHUP.
        celery = str(Path(python).with_name("celery"))
        self._command = [
            *(python, celery, "-q", "-A", app),
            *("worker", "--hostname", f"{name}@here", "--loglevel", "INFO", *QUIET, *options),
        ]
        self._env = {**os.environ, **environment}
        self._directory = directory
        # Celery and Python read other variables, and Celery the kind of pool, before they import.
        self._can_be_forked = (
            all(name.startswith("SHOP_") for name in environment)
            and not any(option.startswith(("-P", "--pool")) for option in options)
            and python == sys.executable
        )
        self._log = log
        self.start()

    def start(self) -> None:
        """Starts the worker; :meth:`ready` waits until it takes messages."""
        self._stopping = False
        self._log.touch()
        self._log_offset = len(self.logs())
        self.process: ForkedCelery | subprocess.Popen[bytes]
        if self._can_be_forked:
            self.process = ForkedCelery(self._command[1:], self._env, self._directory, self._log)
            return
        with self._log.open("ab") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(
                self._command, cwd=self._directory, env=self._env, start_new_session=True, **streams
            )

    @property
    def status(self) -> str:
        """Docker's name of its state: "running" or "exited"."""
        return "running" if self.process.poll() is None else "exited"

    def ready(self) -> bool:
        """Waits until the worker takes messages."""
        message = f"{self.name}@here ready."
        eventually(
            lambda: self.status == "exited" or message in self.logs()[self._log_offset :],
            f"worker {self.name} is ready; its log: {self.logs()}",
        )
        assert self.status == "running", f"worker {self.name} exited; its log: {self.logs()}"
        return True

    def logs(self) -> str:
        """Returns its output since it was first started."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Sends a signal; after SIGKILL, waits for the process."""
        number = _signal_number(signal)
        if number in GROUP_SIGNALS:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        if number == _signal_number("SIGKILL"):
            self.process.wait(STOP_SECONDS)

    def reload(self) -> None:
        """Does nothing: `status` is always current, unlike that of a Docker client."""

    def restart(self, timeout: float = STOP_SECONDS) -> None:
        """Stops the worker if it runs, and starts it again."""
        self.stop(timeout)
        self.start()
        self.ready()

    def request_shutdown(self) -> None:
        """Begins a warm shutdown."""
        if self.status == "running" and not self._stopping:
            self._stopping = True
            self.kill("SIGCONT")
            self.kill("SIGTERM")

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Performs a warm shutdown; kills the worker after `timeout`."""
        self.request_shutdown()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill("SIGKILL")

    teardown = stop


def end_workers(workers: Sequence[WorkerProcess]) -> None:
    """Kills workers after a test, because a warm shutdown takes two seconds.

    With coverage, they shut down: it learns what they have run only when they exit.
    """
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        for worker in workers:
            worker.request_shutdown()
        for worker in workers:
            worker.stop()
    for worker in workers:
        if worker.status == "running":
            worker.kill()


class Worker(CeleryTestWorker):
    """A worker under test."""

    container: WorkerProcess
    _logs_read = 0

    def freeze(self) -> None:
        """Pauses the worker and its pool (SIGSTOP)."""
        self.kill("SIGSTOP")

    def resume(self) -> None:
        """Continues the worker and its pool (SIGCONT)."""
        self.kill("SIGCONT")

    def children(self) -> list[int]:
        """Returns the process ids of the pool."""
        (stats,) = self.app.control.inspect([f"{self.name()}@here"]).stats().values()
        return stats["pool"]["processes"]

    def children_run(self, task: Any, ledger: Ledger) -> None:
        """Returns when each process of the pool has run a call of `task`, at the same time."""
        orders = [uuid4().hex for _ in self.children()]
        for order in orders:
            ledger.hold(order)
        results = [task.delay(order) for order in orders]
        for order in orders:
            ledger.wait_for_run(order)
        for order, result in zip(orders, results, strict=True):
            ledger.release(order)
            result.get(timeout=SOON)

    def wait_for_log(self, log: str, message: str = "", timeout: float = SOON) -> None:
        """Waits until the output contains `log`; pytest-celery polls once a second only."""
        eventually(lambda: log in self.logs(), message or f"{self.name()} logs {log!r}", timeout)

    def new_logs(self) -> str:
        """Returns the output since the last call."""
        logs = self.logs()
        start, self._logs_read = self._logs_read, len(logs)
        return logs[start:]

    def wait_for_exit(self) -> int:
        """Waits until the worker exits; returns its exit code."""
        return self.container.process.wait(SOON)


class Shop:
    """A broker, the app of the test, and the workers.

    Args:
        server: stores messages, results, records and the ledger; each shop has its own databases.
        directory: for the workers' logs.
        settings: of the Celery app, in test and workers; must be serializable as JSON.
    """

    _databases = count(0, 2)
    #: Whether its workers' messages end without a decision.
    bypasses = False

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
        """Starts a worker and waits until it takes messages.

        Args:
            options: further options of ``celery worker``.
            ready: whether to wait; False for a worker that fails to start.
            environment: additional environment variables.
        """
        name = f"{self._directory.name}-{len(self.workers) + 1}"
        options = ("--concurrency", str(concurrency), *options)
        environment = {SETTINGS_VARIABLE: json.dumps(self.settings), **environment}
        process = WorkerProcess(name, options, environment, self._directory / f"{name}.log")
        worker = Worker(process, self.app)
        self.workers.append(worker)
        if ready:
            worker.ready()
        return worker

    @property
    def running(self) -> int:
        """The number of its workers that run."""
        return sum(worker.container.status == "running" for worker in self.workers)

    def control(self, command: str, *args: Any) -> Any:
        """Sends a command of remote control; returns when all workers have replied."""
        send = getattr(self.app.control, command)
        return send(*args, reply=True, timeout=SOON, limit=self.running)

    def messages(self, queue: str = "celery") -> int:
        """Returns the number of messages in the broker, unacknowledged ones included."""
        return self.redis.llen(queue) + self.redis.hlen("unacked")

    def deliver_kept(self, task_id: str) -> bytes:
        """Delivers a message of the queue `kept`, and returns it, so that it can come again.

        From then on it belongs to the default queue, to which it also returns.
        """

        def kept() -> Any:
            messages = self.redis.lrange("kept", 0, -1)
            return next((message for message in messages if task_id.encode() in message), None)

        message = eventually(kept, "the message is published")
        self.redis.lrem("kept", 1, message)
        message = message.replace(b'"routing_key": "kept"', b'"routing_key": "celery"')
        self.redis.lpush("celery", message)
        return bytes(message)

    def replay(self, message: bytes, task_id: str, number: int = 1) -> None:
        """Delivers a message again, and returns when it was answered by its record."""
        self.redis.lpush("celery", message)
        self.ledger.wait_for_signal(task_id, "replayed", number)
        self.wait_until_empty()

    def wait_until_empty(self, seconds: float = SOON) -> None:
        """Waits until the broker has no message left."""
        eventually(lambda: self.messages() == 0, "the broker has no message left", seconds)

    def print_logs(self) -> None:
        """Prints the new output of all workers; pytest shows it if the test fails."""
        for worker in self.workers:
            print(f"--- worker {worker.name()} ---", worker.new_logs(), sep="\n")

    def __enter__(self) -> Shop:
        self.app.set_current()
        return self

    def __exit__(self, *_: object) -> None:
        self.ledger.release_all()
        end_workers([worker.container for worker in self.workers])
        self.print_logs()
        self.redis.close()
        close(self.app)
        assert self.bypasses or not any(BYPASSED in worker.logs() for worker in self.workers)


OpenShop = Callable[..., Shop]


def _signal_number(name: str | int) -> int:
    return getattr(signal, name) if isinstance(name, str) else name


class Monitor:
    """Receives a shop's events, as Flower does."""

    def __init__(self, shop: Shop) -> None:
        self.state = shop.app.events.State()
        self.received: list[dict[str, Any]] = []
        ready = threading.Event()
        self._connection = shop.app.connection()
        self._receiver = shop.app.events.Receiver(self._connection, handlers={"*": self._on_event})
        self._receiver.on_consume_ready = lambda *_, **__: ready.set()
        self._thread = threading.Thread(target=self._receiver.capture, args=(None, None, False))
        self._thread.start()
        assert ready.wait(SOON)

    def _on_event(self, event: dict[str, Any]) -> None:
        self.state.event(dict(event))
        self.received.append(event)

    def wait_for(self, name: str, task_id: str) -> dict[str, Any]:
        """Waits for an event about a task, and returns it."""
        return eventually(
            lambda: next(
                (e for e in self.received if e["type"] == name and e.get("uuid") == task_id), None
            ),
            f"{name} of {task_id}; received: {[e['type'] for e in self.received]}",
        )

    def stop(self) -> None:
        self._receiver.should_stop = True
        self._thread.join(SOON)
        self._connection.release()


def scrape(port: int) -> dict[str, float]:
    """Returns the metrics that a worker serves, by name and labels."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SOON) as response:
        lines = response.read().decode().splitlines()
    series = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in series}


#: In seconds, instead of the default of 60.
LEASE = 2.0

#: The queue of the worker that is frozen; a frozen worker may hold messages of its queue.
FIRST_QUEUE = "first"


def freeze_past_the_lease(
    shop: Shop, task: Any, order: str, within: str = ""
) -> tuple[Run, Run, list[ReceivedSignal]]:
    """Freezes a worker during `task`, runs a duplicate on another worker, and continues the first.

    Args:
        within: the step during which the worker is frozen; before the first step if empty.

    Returns:
        The frozen execution, the one that took over, and the signals of the first.
    """
    ledger = shop.ledger
    owner = shop.start_worker("--queues", FIRST_QUEUE, concurrency=1)
    held = f"{within} of {order}" if within else order
    ledger.hold(held)
    first = task.apply_async((order,), queue=FIRST_QUEUE)
    ledger.wait_for_run(order)
    if within:
        eventually(lambda: within in ledger.notes(order), f"step {within} has started")
    owner.freeze()
    shop.start_worker(concurrency=1)
    ledger.release(held)
    receipt = task.delay(order).get(timeout=SOON)
    owner.resume()
    assert first.get(timeout=SOON) == receipt
    eventually(lambda: ledger.runs(order)[0].end, "the resumed execution ends")
    shop.wait_until_empty()
    frozen, winner = ledger.runs(order)
    return frozen, winner, ledger.signals(first.id)


def end_lease(task: Any, *args: Any) -> None:
    """Ends the lease of the execution that holds the key of a call."""
    key, record = task.idempotency_key_of(*args), task.idempotency_record(*args)
    abandon = commands.abandon(key, record.task_id, record.worker, grace_ms=0, reason="")
    task.idempotency_configuration.execute(abandon)


def check_duplicates(shop: Shop, task: Any, order: str, number: int, at_once: bool = True) -> Any:
    """Asserts that duplicates of a running call get its result, without an execution; returns it.

    Args:
        at_once: whether the pool takes them while the first call runs.
    """
    ledger = shop.ledger
    first = ledger.start(task, order)
    duplicates = [task.delay(order) for _ in range(number)]
    if at_once:
        for duplicate in duplicates:
            ledger.wait_for_signal(duplicate.id, "conflicted")
    ledger.release(order)
    receipts = [result.get(timeout=SOON) for result in (first, *duplicates)]
    assert receipts == [receipts[0]] * (1 + number)
    assert [run.task_id for run in ledger.runs(order)] == [first.id]
    return receipts[0]


def check_retry(shop: Shop, task: Any, order: str, **options: Any) -> AsyncResult:
    """Asserts that a task that retries soon runs again, and that its duplicate does not."""
    results = []
    for _ in range(2):
        results.append(task.apply_async((order, 0.1), **options))
        results[-1].get(timeout=SOON)
    assert results[1].result == results[0].result
    assert [run.end for run in shop.ledger.runs(order)] == ["Retry", "returned"]
    return results[0]
