"""The audit of time: doubled effects that nobody can avoid, made on purpose and counted.

Two things double an effect whatever a library does. A process that is frozen past its lease does
not know that another has taken over; and a master that is replaced by a replica which did not have
an acknowledged begin yet has forgotten it. What a library can do is to keep the system downstream
right (by fencing tokens), to give all callers one outcome, and to close the second gap
(`idempotency_wait_replicas`).
"""

from __future__ import annotations

import argparse
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
from rich.table import Table

from celery_idempotent.testing.server import RedisServer
from tests.labs.chaos import downstream
from tests.labs.chaos.app import CONFIG_VARIABLE, NAME, QUEUE, AppConfig, make_app
from tests.labs.chaos.downstream import Downstream
from tests.labs.chaos.schedule import LEASE
from tests.labs.comparison.contestants import OURS
from tests.labs.outages.ledger import Ledger
from tests.servers.sentinel import SentinelServers
from tests.servers.waiting import wait_until
from tests.waiting import eventually
from tests.worker.harness import WorkerProcess

REPOSITORY = Path(__file__).parents[3]

#: Executions that are frozen.
FROZEN = 20
#: Failovers, and executions that each of them forgets.
FAILOVERS, EACH = 5, 4
#: Seconds: longest wait for a failover and what follows it.
PATIENCE = 60.0
#: Seconds after which an experiment that does not end has hung.
HUNG = 300.0

HEADINGS = (
    "",
    "executions struck",
    "doubled effects",
    "stale writes refused",
    "… accepted",
    "outcomes differ",
    "callers without an answer",
)


@dataclass(frozen=True)
class Count:
    """What one experiment has brought."""

    struck: int
    doubled: int
    refused: int
    accepted: int
    differing: int
    unanswered: int


@dataclass(frozen=True)
class Audit:
    """All experiments, by name."""

    counts: dict[str, Count]

    @property
    def as_told(self) -> bool:
        """Whether effects are doubled where that is told, and nothing else goes wrong anywhere."""
        return all(
            (count.doubled == count.struck) is doubles
            and count.doubled in (0, count.struck)
            and count.refused == count.doubled
            and not (count.accepted or count.differing or count.unanswered)
            for count, (_, doubles, _) in zip(
                self.counts.values(), EXPERIMENTS.values(), strict=True
            )
        )

    def table(self) -> Table:
        """For a terminal."""
        table = Table(caption="doubled effects that nobody can avoid, and two that one can")
        for number, heading in enumerate(HEADINGS):
            justify = "left" if number == 0 else "right"
            table.add_column(heading, justify=justify, overflow="fold")
        for line in self._lines():
            table.add_row(*line)
        return table

    def markdown(self) -> str:
        """For a document."""
        rows = [HEADINGS, ["---"] + ["--:"] * (len(HEADINGS) - 1), *self._lines()]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)

    def _lines(self) -> Iterator[list[str]]:
        for name, count in self.counts.items():
            yield [EXPERIMENTS[name][0], *(str(number) for number in asdict(count).values())]


def run(below: Path, beside: Console) -> Audit:
    """All experiments, each in a process of its own."""
    counts = {}
    for name, (title, _, _) in EXPERIMENTS.items():
        folder = below / f"audit-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with beside.status(f"audit: {title}"):
            done = subprocess.run(
                [sys.executable, "-m", "tests.labs.chaos.audit", name, str(folder)],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                text=True,
                timeout=HUNG,
                check=True,
            )
        counts[name] = Count(**json.loads(done.stdout.splitlines()[-1]))
        beside.print(f"audit: {title}: {counts[name].doubled} doubled", markup=False)
    return Audit(counts)


class _Scene:
    """An app, its workers, and a file that lets all its tasks go on."""

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
            "idempotency_wait_replicas_timeout": 0.3,
            "idempotency_breaker_max_delay": 1.0,
            **settings,
        }
        service = Downstream(folder / "downstream.sqlite")
        self._servers.enter_context(service)
        self.config = AppConfig(OURS.name, str(folder), store, service.port, LEASE, settings)
        self.app = make_app(self.config)
        self.ledger: Ledger = self.config.ledger()
        self._folder = folder

    def worker(self, queue: str, children: int) -> WorkerProcess:
        """A worker that takes messages by now."""
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
        """A call for each order; its task ends once there is a file `until`."""
        task = self.app.tasks["chaos.held"]
        return [task.apply_async((order, str(until), checks), queue=queue) for order in orders]

    def wait_for(self, what: str, number: int, of: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for so many lines in the ledger."""
        eventually(
            lambda: sum(map(of, self.ledger.read(what))) >= number, f"{number} {what}", PATIENCE
        )

    def count(self, calls: dict[str, list[AsyncResult]]) -> Count:
        """What has become of the calls for each order, once all are answered or nobody waits."""
        results = [result for each in calls.values() for result in each]
        try:
            eventually(lambda: all(result.ready() for result in results), "answers", PATIENCE)
        except TimeoutError:
            """Counted below."""
        told = {order: {str(result.result) for result in each} for order, each in calls.items()}
        asked = downstream.entries(self._folder / "downstream.sqlite")
        effects = [sum(entry.receipt is not None for entry in asked[order]) for order in calls]
        return Count(
            struck=len(calls),
            doubled=sum(number > 1 for number in effects),
            refused=sum(map(downstream.stale_refused, asked.values())),
            accepted=sum(map(downstream.stale_accepted, asked.values())),
            differing=sum(len(outcomes) > 1 for outcomes in told.values()),
            unanswered=sum(not result.ready() for result in results),
        )

    def __enter__(self) -> _Scene:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.close()


def _frozen(folder: Path, checks: bool) -> Count:
    """A worker is frozen amid its tasks; another one takes over and ends them; then it thaws."""
    until = folder / "go on"
    orders = [f"order-{number}" for number in range(FROZEN)]
    with RedisServer.start() as store, _Scene(folder, store.url) as scene:
        owner = scene.worker("first", FROZEN)
        scene.worker("second", FROZEN)
        first = scene.publish(orders, "first", until, checks=checks)
        scene.wait_for("begun", FROZEN, lambda line: True)
        owner.kill("SIGSTOP")
        second = scene.publish(orders, "second", until, checks=checks)
        scene.wait_for("begun", 2 * FROZEN, lambda line: True)
        until.touch()
        scene.wait_for("done", FROZEN, lambda line: True)
        owner.kill("SIGCONT")
        return scene.count(_by_order(orders, first, second))


def _failovers(folder: Path, wait_replicas: int) -> Count:
    """A master dies that its replica was cut off from when it acknowledged a begin, or did not."""
    calls: dict[str, list[AsyncResult]] = {}
    with SentinelServers.start() as trio:
        settings = {
            "idempotency_redis_options": {"master_name": trio.master_name},
            "idempotency_wait_replicas": wait_replicas,
        }
        with _Scene(folder, trio.url, **settings) as scene:
            scene.worker(QUEUE, 2 * EACH)
            for failover in range(FAILOVERS):
                until = folder / f"go on {failover}"
                orders = [f"order-{failover}-{number}" for number in range(EACH)]
                first = _forget(trio, scene, orders, until, acknowledged=not wait_replicas)
                second = scene.publish(orders, QUEUE, until)
                begun = EACH if wait_replicas else 2 * EACH
                scene.wait_for("begun", begun, lambda line, these=orders: line["order"] in these)
                until.touch()
                calls |= _by_order(orders, first, second)
                eventually(
                    lambda results=(*first, *second): all(r.ready() for r in results),
                    "answers",
                    PATIENCE,
                )
            return scene.count(calls)


def _forget(
    trio: SentinelServers, scene: _Scene, orders: Sequence[str], until: Path, *, acknowledged: bool
) -> list[AsyncResult]:
    """Let executions begin that the next master knows nothing of."""
    with _cut_off(trio):
        results = scene.publish(orders, QUEUE, until)
        ids = {result.id for result in results}
        what = "begun" if acknowledged else "put off"
        scene.wait_for(what, EACH, lambda line: line["task_id"] in ids)
    trio.rejoin()
    return results


@contextmanager
def _cut_off(trio: SentinelServers) -> Iterator[None]:
    """The replica hears nothing of its master any more; then that dies, and it takes over."""
    master, heir = trio.master, trio.replica
    # Frozen first, so that it cannot connect again; and nothing is on its way to it.
    heir.pause()
    try:
        with master.client() as client:
            client.client_kill_filter(_type="replica")
        yield
        master.kill()
    finally:
        heir.resume()
    wait_until(lambda: trio.master is heir and _is_master(heir), "No other master")


def _is_master(server: RedisServer) -> bool:
    with server.client(decode_responses=True) as client:
        return bool(client.role()[0] == "master")


def _by_order(
    orders: Sequence[str], first: Sequence[AsyncResult], second: Sequence[AsyncResult]
) -> dict[str, list[AsyncResult]]:
    return {order: list(each) for order, *each in zip(orders, first, second, strict=True)}


#: By name: as the table has it, whether every effect is doubled, and what does it.
EXPERIMENTS: dict[str, tuple[str, bool, Callable[[Path], Count]]] = {
    "frozen": (
        "frozen past the lease (SIGSTOP)",
        True,
        lambda folder: _frozen(folder, checks=False),
    ),
    "checks": (
        "… the task asks `self.idempotency.check()` before its effect",
        False,
        lambda folder: _frozen(folder, checks=True),
    ),
    "forgotten": (
        f"{FAILOVERS} failovers that forget an acknowledged begin",
        True,
        lambda folder: _failovers(folder, wait_replicas=0),
    ),
    "waited": (
        f"{FAILOVERS} such failovers, `wait_replicas = 1`",
        False,
        lambda folder: _failovers(folder, wait_replicas=1),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.labs.chaos.audit", description=__doc__)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    _, _, experiment = EXPERIMENTS[asked.experiment]
    print(json.dumps(asdict(experiment(asked.folder))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
