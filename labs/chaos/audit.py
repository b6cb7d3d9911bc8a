"""The audit: provokes duplicate effects that a library cannot prevent, and counts them.

Two faults cause them: a process that is frozen past its lease does not detect the takeover, and a
promoted replica may lack an acknowledged begin. A library can protect the downstream system by
fencing tokens, return one outcome to all callers, and avoid the second fault
(`idempotency_wait_replicas`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from celery.result import AsyncResult
from rich.console import Console

from labs.chaos import downstream
from labs.chaos.app import CONFIG_VARIABLE, NAME, QUEUE, AppConfig, make_app
from labs.chaos.downstream import Downstream
from labs.chaos.schedule import LEASE
from labs.comparison.contestants import OURS
from labs.rig.ledger import Ledger
from labs.rig.report import markdown
from tests.servers.groups import SentinelServers
from tests.servers.program import wait_until
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually
from tests.worker.harness import WorkerProcess

REPOSITORY = Path(__file__).parents[2]

#: Executions that are frozen.
FROZEN = 20
#: Failovers, and executions whose begin each of them loses.
FAILOVERS, EXECUTIONS_PER_FAILOVER = 5, 4
#: Longest wait for a failover and the results after it, in seconds.
RESULT_TIMEOUT = 60.0
#: Longest duration of an experiment, in seconds.
RUN_TIMEOUT = 300.0

HEADINGS = (
    "",
    "affected executions",
    "duplicate effects",
    "stale writes rejected",
    "… accepted",
    "outcomes differ",
    "callers without a result",
)


@dataclass(frozen=True)
class Count:
    """The result of one experiment."""

    affected: int
    duplicates: int
    rejected: int
    accepted: int
    differing: int
    unanswered: int


@dataclass(frozen=True)
class Audit:
    """The results of all experiments, by name."""

    counts: dict[str, Count]

    @property
    def as_expected(self) -> bool:
        """Whether effects are duplicated exactly where expected, without further failures."""
        return all(
            (count.duplicates == count.affected) is duplicates
            and count.duplicates in (0, count.affected)
            and count.rejected == count.duplicates
            and not (count.accepted or count.differing or count.unanswered)
            for count, (_, duplicates, _) in zip(
                self.counts.values(), EXPERIMENTS.values(), strict=True
            )
        )

    def markdown(self) -> str:
        """Returns the table."""
        lines = [
            [EXPERIMENTS[name][0], *map(str, asdict(count).values())]
            for name, count in self.counts.items()
        ]
        return markdown(HEADINGS, lines)


def run(root: Path, stderr: Console) -> Audit:
    """Runs all experiments, each in its own process."""
    counts = {}
    for name, (title, _, _) in EXPERIMENTS.items():
        folder = root / f"audit-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with stderr.status(f"audit: {title}"):
            process = subprocess.run(
                [sys.executable, "-m", "labs.chaos.audit", name, str(folder)],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                text=True,
                timeout=RUN_TIMEOUT,
                check=True,
            )
        counts[name] = Count(**json.loads(process.stdout.splitlines()[-1]))
        duplicates = counts[name].duplicates
        stderr.print(f"audit: {title}: {duplicates} duplicate effects", markup=False)
    return Audit(counts)


class _Environment:
    """An app, its workers and its servers."""

    def __init__(self, folder: Path, store: str, **settings: Any) -> None:
        self._servers = ExitStack()
        databases = self._servers.enter_context(RedisServer.start(config={"databases": "2"}))
        url = databases.url.rpartition("/")[0]
        settings = {
            "broker_url": f"{url}/0",
            "result_backend": f"{url}/1",
            "task_default_queue": QUEUE,
            "worker_prefetch_multiplier": 1,
            "idempotency_redis_timeout": 1.0,
            **settings,
        }
        service = Downstream(folder / "downstream.sqlite")
        self._servers.enter_context(service)
        self.config = AppConfig(OURS.name, str(folder), store, service.port, LEASE, settings)
        self.app = make_app(self.config)
        self.ledger: Ledger = self.config.ledger()
        self._folder = folder

    def worker(self, queue: str, children: int) -> WorkerProcess:
        """Starts a worker and waits until it is ready."""
        worker = WorkerProcess(
            queue,
            ("--concurrency", str(children), "--queues", queue),
            {CONFIG_VARIABLE: self.config.to_json()},
            self._folder / f"{queue}.log",
            app=NAME,
        )
        self._servers.callback(worker.kill, "SIGKILL")
        worker.ready()
        return worker

    def publish(
        self, orders: Sequence[str], queue: str, until: Path, *, checks: bool = False
    ) -> list[AsyncResult]:
        """Publishes a call for each order; its task ends when the file `until` exists."""
        task = self.app.tasks["chaos.held"]
        return [task.apply_async((order, str(until), checks), queue=queue) for order in orders]

    def wait_for(self, event: str, number: int, matches: Callable[[dict[str, Any]], bool]) -> None:
        """Waits for `number` matching events in the ledger."""
        eventually(
            lambda: sum(map(matches, self.ledger.read(event))) >= number,
            f"{number} × {event}",
            RESULT_TIMEOUT,
        )

    def count(self, calls: dict[str, list[AsyncResult]]) -> Count:
        """Evaluates the calls, by order, when all results have arrived or after a timeout."""
        results = [result for each in calls.values() for result in each]
        with contextlib.suppress(TimeoutError):
            eventually(lambda: all(result.ready() for result in results), "results", RESULT_TIMEOUT)
        outcomes = [{str(result.result) for result in each} for each in calls.values()]
        requests = downstream.requests(self._folder / "downstream.sqlite")
        effects = [sum(each.receipt is not None for each in requests[order]) for order in calls]
        return Count(
            affected=len(calls),
            duplicates=sum(number > 1 for number in effects),
            rejected=sum(map(downstream.stale_rejected, requests.values())),
            accepted=sum(map(downstream.stale_accepted, requests.values())),
            differing=sum(len(each) > 1 for each in outcomes),
            unanswered=sum(not result.ready() for result in results),
        )

    def __enter__(self) -> _Environment:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.close()


def _frozen(folder: Path, checks: bool) -> Count:
    """Freezes a worker during its tasks; another worker takes over; the first one continues."""
    until = folder / "continue"
    orders = [f"order-{number}" for number in range(FROZEN)]
    with RedisServer.start() as store, _Environment(folder, store.url) as environment:
        frozen = environment.worker("first", FROZEN)
        environment.worker("second", FROZEN)
        first = environment.publish(orders, "first", until, checks=checks)
        environment.wait_for("started", FROZEN, lambda line: True)
        frozen.kill("SIGSTOP")
        second = environment.publish(orders, "second", until, checks=checks)
        environment.wait_for("started", 2 * FROZEN, lambda line: True)
        until.touch()
        environment.wait_for("effect", FROZEN, lambda line: True)
        frozen.kill("SIGCONT")
        return environment.count(_by_order(orders, first, second))


def _failovers(folder: Path, wait_replicas: int) -> Count:
    """Kills a master whose replica was disconnected when it received begins.

    Without `wait_replicas`, the master acknowledges them, and the promoted replica lacks them.
    """
    calls: dict[str, list[AsyncResult]] = {}
    with SentinelServers.start() as sentinels:
        settings = {
            "idempotency_redis_options": {"master_name": sentinels.master_name},
            "idempotency_wait_replicas": wait_replicas,
        }
        with _Environment(folder, sentinels.url, **settings) as environment:
            environment.worker(QUEUE, 2 * EXECUTIONS_PER_FAILOVER)
            for failover in range(FAILOVERS):
                until = folder / f"continue {failover}"
                orders = [f"order-{failover}-{n}" for n in range(EXECUTIONS_PER_FAILOVER)]
                first = _publish_before_failover(
                    sentinels, environment, orders, until, acknowledged=not wait_replicas
                )
                second = environment.publish(orders, QUEUE, until)
                environment.wait_for(
                    "started",
                    len(orders) if wait_replicas else 2 * len(orders),
                    lambda line, orders=orders: line["order"] in orders,
                )
                until.touch()
                calls |= _by_order(orders, first, second)
                eventually(
                    lambda results=(*first, *second): all(r.ready() for r in results),
                    "results",
                    RESULT_TIMEOUT,
                )
            return environment.count(calls)


def _publish_before_failover(
    sentinels: SentinelServers,
    environment: _Environment,
    orders: Sequence[str],
    until: Path,
    *,
    acknowledged: bool,
) -> list[AsyncResult]:
    """Publishes calls whose begins the promoted replica lacks."""
    with _failover_without_replication(sentinels):
        results = environment.publish(orders, QUEUE, until)
        ids = {result.id for result in results}
        event = "started" if acknowledged else "postponed"
        environment.wait_for(event, len(orders), lambda line: line["task_id"] in ids)
    sentinels.rejoin()
    return results


@contextmanager
def _failover_without_replication(sentinels: SentinelServers) -> Iterator[None]:
    """Disconnects the replica during the block; kills the master afterwards."""
    master, replica = sentinels.master, sentinels.replica
    # Paused first, so that the replica cannot reconnect.
    replica.pause()
    try:
        with master.client() as client:
            client.client_kill_filter(_type="replica")
        yield
        master.kill()
    finally:
        replica.resume()
    wait_until(
        lambda: sentinels.master is replica and _is_master(replica), "the replica was not promoted"
    )


def _is_master(server: RedisServer) -> bool:
    with server.client(decode_responses=True) as client:
        return bool(client.role()[0] == "master")


def _by_order(
    orders: Sequence[str], first: Sequence[AsyncResult], second: Sequence[AsyncResult]
) -> dict[str, list[AsyncResult]]:
    return {order: list(each) for order, *each in zip(orders, first, second, strict=True)}


#: By name: the title, whether every effect is duplicated, and the function.
EXPERIMENTS: dict[str, tuple[str, bool, Callable[[Path], Count]]] = {
    "frozen": (
        "frozen past the lease (SIGSTOP)",
        True,
        lambda folder: _frozen(folder, checks=False),
    ),
    "checks": (
        "… the task calls `self.idempotency.check()` before its effect",
        False,
        lambda folder: _frozen(folder, checks=True),
    ),
    "forgotten": (
        f"{FAILOVERS} failovers that lose an acknowledged begin",
        True,
        lambda folder: _failovers(folder, wait_replicas=0),
    ),
    "waited": (
        "… `wait_replicas = 1`",
        False,
        lambda folder: _failovers(folder, wait_replicas=1),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m labs.chaos.audit", description=__doc__)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    _, _, experiment = EXPERIMENTS[arguments.experiment]
    print(json.dumps(asdict(experiment(arguments.folder))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
