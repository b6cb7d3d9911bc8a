"""A rolling deploy: workers of the version before and of this one share one queue and one store.

Each test runs both ways: what one version has stored, the other reads, and the reverse.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult
from cryptography.fernet import Fernet

from tests.apps import close
from tests.packaging.versions.library import ROOT, Library, install, install_commit, previous_commit
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.harness import FAST_REDELIVERY, Worker, WorkerProcess
from tests.worker.ledger import Ledger

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.worker]

#: Both versions take messages from this queue, and each from one that has its name.
SHARED = "shared"


@dataclass(frozen=True)
class Versions:
    """A worker of each version, and a publisher that has Celery alone."""

    app: Celery
    ledger: Ledger
    workers: dict[str, Worker]

    def send(self, task: str, *args: str, queue: str = SHARED, **options: Any) -> AsyncResult:
        """Publishes a call by name."""
        return self.app.send_task(f"shop.{task}", args, queue=queue, **options)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[Library]:
    """The version before this one, and this one."""
    try:
        commit = previous_commit()
    except LookupError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("versions")
    return [
        install_commit("previous", commit, folder / "previous"),
        install("this", ROOT, folder / "this"),
    ]


@pytest.fixture(scope="module")
def versions(
    libraries: list[Library], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Versions]:
    """A worker of each version, on one broker and one store."""
    formats = [library.formats() for library in libraries]
    if formats[0] != formats[1]:
        page = (ROOT / "docs/upgrading.md").read_text("utf-8")
        assert f"| {' | '.join(f'`{part}`' for part in formats[1])} |" in page
        pytest.skip(f"these versions do not share records: {formats[0]} and {formats[1]}")
    logs = tmp_path_factory.mktemp("logs")
    with RedisServer.start(config={}) as server:
        url = server.url.rpartition("/")[0]
        settings: dict[str, Any] = {"broker_url": f"{url}/0", "result_backend": f"{url}/0"}
        settings |= {"shop_ledger": f"{url}/1", "idempotency_compression": "gzip"}
        settings["idempotency_encryption_keys"] = [Fernet.generate_key().decode()]
        settings["broker_transport_options"] = FAST_REDELIVERY
        settings["broker_connection_retry_on_startup"] = True
        app = Celery("publisher", set_as_current=False)
        app.conf.update(settings)
        workers: dict[str, Worker] = {}
        for library in libraries:
            name, log = library.name, logs / f"{library.name}.log"
            options = ("--concurrency", "3", "--queues", f"{SHARED},{name}")
            environment = {"SHOP_SETTINGS": json.dumps(settings), "SHOP_VERSION": name}
            environment |= {"SHOP_LIBRARY": str(library.folder), **library.environment}
            environment["COVERAGE_PROCESS_CONFIG"] = ""  # coverage has no source for these
            where = {"app": "tests.packaging.versions.shop", "directory": library.folder}
            workers[name] = Worker(WorkerProcess(name, options, environment, log, **where), app)
        versions = Versions(app, Ledger(settings["shop_ledger"]), workers)
        try:
            for worker in workers.values():
                worker.ready()
            yield versions
        finally:
            versions.ledger.release_all()
            for worker in workers.values():
                worker.container.request_shutdown()
            for worker in workers.values():
                worker.teardown()
                print(f"--- worker {worker.name()} ---", worker.new_logs(), sep="\n")
            close(app)


both_ways = pytest.mark.parametrize(
    ("one", "other"), [("previous", "this"), ("this", "previous")], ids=["forwards", "backwards"]
)


@both_ways
def test_duplicates_get_the_outcome(versions: Versions, order: str, one: str, other: str) -> None:
    ledger = versions.ledger
    ledger.hold(order)
    first = versions.send("charge", order, queue=one)
    ledger.wait_for_run(order)

    duplicate = versions.send("charge", order, queue=other)
    copy = versions.send("charge", order, queue=other, task_id=first.id)
    for result in (duplicate, copy):
        ledger.wait_for_signal(result.id, "conflicted")
    ledger.release(order)
    outcome = first.get(timeout=SOON)

    late = versions.send("charge", order, queue=other)
    assert duplicate.get(timeout=SOON) == late.get(timeout=SOON) == outcome
    assert outcome["part"].startswith(one)
    assert ledger.notes(order) == [one]


@both_ways
def test_errors_are_replayed(versions: Versions, order: str, one: str, other: str) -> None:
    errors = [
        versions.send("charge", order, "declined", queue=queue).get(timeout=SOON, propagate=False)
        for queue in (one, other)
    ]

    assert [(type(error).__name__, error.args) for error in errors] == [
        ("ValueError", (f"{order} is declined",))
    ] * 2
    assert versions.ledger.notes(order) == [one]


@both_ways
def test_steps_are_taken_over(versions: Versions, order: str, one: str, other: str) -> None:
    ledger = versions.ledger
    ledger.hold(order)
    first = versions.send("brief", order, queue=one)
    ledger.wait_for_run(order)
    versions.workers[one].freeze()

    duplicate = versions.send("brief", order, queue=other)
    second_run = ledger.wait_for_run(order, 2)
    ledger.release(order)
    outcome = duplicate.get(timeout=SOON)
    versions.workers[one].resume()

    assert first.get(timeout=SOON) == outcome
    assert outcome["part"].startswith(one)
    assert second_run.attempt == 2
    eventually(lambda: all(run.end for run in ledger.runs(order)), "the frozen run ends")
    assert len(ledger.runs(order)) == 2
    tokens = [run.token for run in ledger.runs(order)]
    assert tokens == sorted(set(tokens))
    ledger.wait_for_signal(duplicate.id, "completed")
    completed = {id_: len(ledger.signals(id_, "completed")) for id_ in (first.id, duplicate.id)}
    assert completed == {first.id: 0, duplicate.id: 1}


@both_ways
def test_one_runs_at_a_time(versions: Versions, order: str, one: str, other: str) -> None:
    ledger = versions.ledger
    ledger.hold(order)
    first = versions.send("finished", order, queue=one)
    ledger.wait_for_run(order)
    second = versions.send("finished", order, queue=other)
    ledger.wait_for_signal(second.id, "conflicted")
    assert len(ledger.runs(order)) == 1

    ledger.release(order)

    assert first.get(timeout=SOON) != second.get(timeout=SOON)
    assert ledger.notes(order) == [one, other]
    copy = versions.send("finished", order, queue=other, task_id=first.id)
    ledger.wait_for_signal(copy.id, "replayed")
    assert len(ledger.runs(order)) == 2


@both_ways
@pytest.mark.parametrize("task", ["reserved", "collapsed"])
def test_a_published_call_is_found_by_the_other_version(
    versions: Versions, order: str, task: str, one: str, other: str
) -> None:
    queue = f"nobody takes {order}"
    ids = {
        versions.send("publish", f"shop.{task}", order, queue, queue=version).get(timeout=SOON)
        for version in (one, other)
    }

    assert len(ids) == 1
    assert versions.app.connection_for_read().default_channel.client.llen(queue) == 1


def test_every_call_ends_once_while_workers_of_both_versions_are_killed(versions: Versions) -> None:
    ledger = versions.ledger
    orders = [f"{number} {os.urandom(8).hex()}" for number in range(16)]
    held, results = orders[:6], {}
    for order in held:
        ledger.hold(order)
    for number, order in enumerate(orders):
        outcome = ("charged", "retried", "declined")[number % 3]
        first = versions.send("charge", order, outcome)
        copy = versions.send("charge", order, outcome, task_id=first.id)
        results[order] = [first, copy, versions.send("charge", order, outcome)]
    processes = eventually(
        lambda: pids if len(pids := _processes(ledger, held)) == 2 else None,
        "both versions run calls",
    )

    for process in processes.values():
        os.kill(process, signal.SIGKILL)
    ledger.release_all()

    for order, calls in results.items():
        outcomes = [call.get(timeout=SOON, propagate=False) for call in calls]
        assert len({repr(outcome) for outcome in outcomes}) == 1, order
        ends = [run.end for run in ledger.runs(order) if run.end not in (None, "Retry")]
        assert len(ends) == 1, order
    attempts = [run.attempt for order in orders for run in ledger.runs(order)]
    assert attempts.count(2) == 2


def _processes(ledger: Ledger, orders: list[str]) -> dict[str, int]:
    """Returns a process of each version that runs one of `orders`, which are held."""
    return {
        version: run.pid
        for order in orders
        for run, version in zip(ledger.runs(order), ledger.notes(order), strict=False)
    }
