"""Fixtures: the wheels of two versions, and a worker of each on one queue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from celery.result import AsyncResult
from cryptography.fernet import Fernet

from tests.apps import close
from tests.servers.redis_server import RedisServer
from tests.worker.harness import FAST_REDELIVERY, Worker, WorkerProcess
from tests.worker.ledger import Ledger

ROOT = Path(__file__).parents[3]
#: Both versions take messages from this queue, and each from one that has its name.
SHARED = "shared"


@dataclass(frozen=True)
class Library:
    """An installed version of this library."""

    #: "previous" or "this".
    name: str
    folder: Path

    def formats(self) -> list[str]:
        """Returns the versions of its records and its keys."""
        code = (
            "from celery_idempotent.key import canonical\n"
            "from celery_idempotent.record import layout\n"
            "print(getattr(layout, 'VERSION', 1), canonical.VERSION.decode())"
        )
        return _run([sys.executable, "-c", code], cwd=self.folder).split()


@dataclass(frozen=True)
class Versions:
    """A worker of each version, and a publisher that has Celery alone."""

    app: Celery
    ledger: Ledger
    workers: dict[str, Worker]

    def send(self, task: str, *args: str, queue: str = SHARED, **options: Any) -> AsyncResult:
        """Publishes a call by name."""
        return self.app.send_task(f"shop.{task}", args, queue=queue, **options)


def _run(command: list[Any], **how: Any) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, **how).stdout


def _previous_commit() -> str:
    """Returns the newest release before this commit or, before the first one, its parent.

    The environment can name another one: ``PREVIOUS_VERSION=main``.
    """
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a clone, so the version before is not here")
    git = ["git", "-C", ROOT]
    if named := os.environ.get("PREVIOUS_VERSION"):
        return _run([*git, "rev-parse", "--verify", named]).strip()
    try:
        tag = [*git, "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD~1"]
        return _run(tag).strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    try:
        changed = _run([*git, "status", "--porcelain", "--", "celery_idempotent", "lua"])
        return _run([*git, "rev-parse", "--verify", "HEAD" if changed else "HEAD~1"]).strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the commit before this one is not here: git fetch --unshallow")


def _install(name: str, source: Path, folder: Path) -> Library:
    """Builds the wheel of a source tree, and installs it without its dependencies."""
    build = [*("-m", "build", "--no-isolation", "--wheel", "--outdir"), folder / "dist", source]
    _run([sys.executable, *build])
    (wheel,) = (folder / "dist").glob("*.whl")
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--target", folder / "library"]
    _run([sys.executable, "-m", "pip", "install", *options, wheel])
    return Library(name, folder / "library")


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[Library]:
    """The version before this one, and this one."""
    commit = _previous_commit()
    folder = tmp_path_factory.mktemp("versions")
    source = folder / "previous" / "source"
    source.mkdir(parents=True)
    archive = folder / "previous.tar"
    _run(["git", "-C", ROOT, "archive", "--output", archive, commit])
    _run(["tar", "--extract", "--file", archive, "--directory", source])
    return [
        _install("previous", source, folder / "previous"),
        _install("this", ROOT, folder / "this"),
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
                        "PYTHONPATH": os.pathsep.join([str(library.folder), str(ROOT)]),
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
