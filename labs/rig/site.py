"""A site: the servers, the workers and the ledger of one run, in a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from typing_extensions import Self

from labs.rig.worker import SETTINGS_VARIABLE, ledger_of, plans_of
from tests.packaging.versions.library import Library
from tests.servers.redis_server import RedisServer
from tests.worker.harness import REPOSITORY, WorkerProcess

#: No acknowledged write is lost in a crash.
DURABLE = {"appendonly": "yes", "appendfsync": "always"}


class Site(ExitStack):
    """The servers, workers and ledger of one run; the end of a ``with`` block ends them.

    Args:
        app: the module of the workers' app, which reads `settings_of_worker`.
        folder: for the ledger and the workers' logs; by default a temporary one.
        python: the interpreter of the workers.

    Attributes:
        settings: of the app, for workers and for those who publish.
        workers: the latest one of each name.
    """

    def __init__(self, app: str, folder: Path | None = None, python: str = sys.executable) -> None:
        super().__init__()
        self.folder = folder or Path(self.enter_context(TemporaryDirectory(prefix="labs-")))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.settings: dict[str, Any] = {
            "lab_folder": str(self.folder),
            "broker_connection_retry_on_startup": True,
        }
        plans_of(self.settings).mkdir(exist_ok=True)
        (self.folder / "ledger").write_bytes(b"")
        self.ledger = ledger_of(self.settings)
        self.callback(self.ledger.close)
        self.workers: dict[str, WorkerProcess] = {}
        self._app, self._python = app, python
        self._groups: set[int] = set()

    def server(self, **options: Any) -> RedisServer:
        """Starts a server, as `RedisServer.start`."""
        return self.enter_context(RedisServer.start(**options))

    def worker(
        self, name: str, *options: str, library: Library | None = None, **settings: Any
    ) -> WorkerProcess:
        """Starts a worker, with `settings` of its own; `ready` waits until it takes messages.

        Args:
            options: of ``celery worker``.
            library: another version of this library.
        """
        worker = self.workers[name] = WorkerProcess(
            name,
            options,
            {
                SETTINGS_VARIABLE: json.dumps({**self.settings, **settings}),
                **(library.environment if library else {}),
            },
            self.folder / f"{name}.log",
            app=self._app,
            # Celery imports from there first.
            directory=library.folder if library else REPOSITORY,
            python=self._python,
        )
        self._groups.add(worker.process.pid)
        return worker

    def restart(self, worker: WorkerProcess) -> None:
        """Starts a worker again that has exited."""
        worker.start()
        self._groups.add(worker.process.pid)

    def wait_until_ready(self) -> None:
        """Waits until all workers take messages."""
        for worker in self.workers.values():
            worker.ready()

    def kill_workers(self) -> None:
        """Kills all workers with their pools."""
        # Each worker leads a process group, in which orphaned pool processes remain.
        for group in self._groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        for worker in self.workers.values():
            worker.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> bool | None:
        self.kill_workers()
        return super().__exit__(*error)
