"""Fixtures: the wheels of two versions, and a worker of each on one queue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from celery.result import AsyncResult
from cryptography.fernet import Fernet

from tests.apps import close
from tests.packaging.versions.library import (
    ROOT,
    Library,
    install,
    install_commit,
    previous_commit,
)
from tests.servers.redis_server import RedisServer
from tests.worker.harness import FAST_REDELIVERY, Worker, WorkerProcess
from tests.worker.ledger import Ledger

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


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
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
        settings: dict[str, Any] = {
            "broker_url": f"{url}/0",
            "result_backend": f"{url}/0",
            "broker_connection_retry_on_startup": True,
            "broker_transport_options": FAST_REDELIVERY,
            "shop_ledger": f"{url}/1",
            "idempotency_encryption_keys": [Fernet.generate_key().decode()],
            "idempotency_compression": "gzip",
        }
        app = Celery("publisher", set_as_current=False)
        app.conf.update(settings)
        workers = {
            library.name: Worker(
                WorkerProcess(
                    library.name,
                    ("--concurrency", "3", "--queues", f"{SHARED},{library.name}"),
                    {
                        "SHOP_SETTINGS": json.dumps(settings),
                        "SHOP_VERSION": library.name,
                        "SHOP_LIBRARY": str(library.folder),
                        "COVERAGE_PROCESS_CONFIG": "",  # coverage has no source for these
                        **library.environment,
                    },
                    logs / f"{library.name}.log",
                    app="tests.packaging.versions.shop",
                    directory=library.folder,
                ),
                app,
            )
            for library in libraries
        }
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


@pytest.fixture
def order() -> str:
    """A unique order."""
    return uuid4().hex
