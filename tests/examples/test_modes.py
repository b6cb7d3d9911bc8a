"""The examples of the modes: one at a time, bursts and periodic tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idempotent.testing import IsolatedRecords
from celery_idempotent.testing.server import RedisServer
from examples.burst.tasks import index
from examples.one_at_a_time.tasks import synchronize
from examples.periodic import tasks as periodic
from tests.apps import close
from tests.waiting import SOON, eventually
from tests.worker.harness import WorkerProcess


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[[Any], WorkerProcess]]:
    """Starts a worker of an example; it uses the broker that the app has in this process."""
    workers: list[WorkerProcess] = []

    def start_worker(task: Any) -> WorkerProcess:
        conf, module = task.app.conf, task.run.__module__
        environment = {"CELERY_BROKER_URL": conf.broker_url}
        environment["CELERY_RESULT_BACKEND"] = conf.result_backend
        options = ("--concurrency", "2")
        worker = WorkerProcess("example", options, environment, tmp_path / "log", module)
        workers.append(worker)
        worker.ready()
        return worker

    yield start_worker
    for worker in workers:
        worker.stop()


@pytest.fixture
def connect() -> Iterator[Callable[[Celery], None]]:
    """Lets an app use a server of the test."""
    apps: list[Celery] = []
    with RedisServer() as server:

        def connect(app: Celery) -> None:
            app.conf.update(broker_url=server.url, result_backend=server.url)
            apps.append(app)

        yield connect
        for app in apps:
            close(app)


@pytest.mark.worker
@pytest.mark.exhaustive
def test_a_mailbox_is_synchronized_by_one_call_after_the_other(
    connect: Callable[[Celery], None], start_worker: Callable[[Any], WorkerProcess]
) -> None:
    connect(synchronize.app)
    worker = start_worker(synchronize)

    calls = [synchronize.delay(mailbox) for mailbox in ("ada", "ada", "grace")]
    assert [call.get(SOON) for call in calls] == [3, 3, 5]

    events = re.findall(r"(\w+): (connected|\d+ new)", worker.logs())
    assert [event for mailbox, event in events if mailbox == "ada"] == ["connected", "3 new"] * 2


@pytest.mark.worker
@pytest.mark.exhaustive
def test_a_burst_is_indexed_twice_at_most(
    connect: Callable[[Celery], None], start_worker: Callable[[Any], WorkerProcess]
) -> None:
    connect(index.app)
    (queued,) = {index.delay(42).id for _ in range(50)}

    worker = start_worker(index)
    eventually(lambda: index.idempotency_record(42).state.value == "STARTED", "it runs")
    worker.kill("SIGSTOP")
    (waiting,) = {index.delay(42).id for _ in range(50)}
    worker.kill("SIGCONT")

    assert waiting != queued
    assert index.AsyncResult(queued).get(SOON) < index.AsyncResult(waiting).get(SOON)
    assert worker.logs().count("indexed product 42") == 2


def test_each_report_is_mailed_once(
    idempotency: IsolatedRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    mailed: list[str] = []
    monkeypatch.setattr(periodic, "send", mailed.append)

    for day in ("monday", "tuesday"):
        for _redelivery in range(2):
            periodic.mail_report.apply(task_id=day).get()

    assert len(mailed) == 2
    (schedule,) = periodic.app.conf.beat_schedule.values()
    assert schedule["task"] in periodic.app.tasks
