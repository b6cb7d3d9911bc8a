"""The workers and their faults; workers that exit are restarted, as by a service manager."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from labs.chaos.app import CONFIG_VARIABLE, NAME, QUEUES, AppConfig
from labs.chaos.schedule import Shape
from labs.comparison.contestants import find_contestant
from labs.rig.ledger import Ledger
from labs.rig.processes import children_of, send_signal, with_children
from tests.packaging.versions.library import Library
from tests.worker.harness import REPOSITORY, WorkerProcess

#: Longest shutdown of a worker, and interval of checks, in seconds.
STOP_SECONDS = 8.0
POLL_INTERVAL = 0.1


class Workers:
    """All workers; leaving the ``with`` block kills them.

    Every fault returns the ids of the affected processes.

    Args:
        previous: a version of the library, which every other worker runs at first.
    """

    def __init__(
        self, config: AppConfig, shape: Shape, ledger: Ledger, previous: Library | None = None
    ) -> None:
        self._config, self._shape = config, shape
        self._ledger = ledger
        self._groups: set[int] = set()
        self.restarts = 0
        self._previous = previous
        #: The version of each worker; None: this one.
        self._libraries = [previous if number % 2 else None for number in range(shape.workers)]
        self._workers = [self._start(number) for number in range(shape.workers)]
        self._note_groups()

    def _start(self, number: int) -> WorkerProcess:
        library = self._libraries[number]
        return WorkerProcess(
            f"w{number + 1}",
            ("--concurrency", str(self._shape.children), "--queues", ",".join(QUEUES)),
            {
                CONFIG_VARIABLE: self._config.to_json(),
                **(library.environment if library else {}),
            },
            Path(self._config.folder) / f"worker-{number + 1}.log",
            app=NAME,
            # Celery imports from there first.
            directory=library.folder if library else REPOSITORY,
            python=find_contestant(self._config.contestant).python,
        )

    def wait_until_ready(self) -> None:
        """Waits until all workers are ready."""
        for worker in self._workers:
            worker.ready()

    def assert_fused_completion(self) -> None:
        """Checks in the log of each worker that every task has fused completion."""
        for worker in self._workers:
            log = worker.logs()
            assert "fused completion off" not in log, log

    def supervise(self) -> None:
        """Restarts workers that have exited."""
        for number, worker in enumerate(self._workers):
            if worker.status == "exited":
                self._workers[number] = self._start(number)
                self.restarts += 1
        self._note_groups()

    # Faults

    def kill_child(self, target: float, seconds: float) -> list[int]:
        """Kills one process of a pool, preferably a busy one."""
        child = self._choose_child(target)
        return send_signal([child], signal.SIGKILL) if child else []

    def kill_worker(self, target: float, seconds: float) -> list[int]:
        """Kills a worker and its pool, as when a host fails."""
        pids = self._choose_worker(target)
        if pids:
            # At once: each worker leads a process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pids[0], signal.SIGKILL)
        return pids

    def kill_parent(self, target: float, seconds: float) -> list[int]:
        """Kills the main process of a worker; its pool exits, too."""
        pids = self._choose_worker(target)
        send_signal(pids[:1], signal.SIGKILL)
        return pids

    def freeze_child(self, target: float, seconds: float) -> list[int]:
        """Pauses one process of a pool, preferably a busy one."""
        child = self._choose_child(target)
        return self._freeze([child] if child else [], seconds)

    def freeze_worker(self, target: float, seconds: float) -> list[int]:
        """Pauses a worker and its pool."""
        return self._freeze(self._choose_worker(target), seconds)

    def stop_worker(self, target: float, seconds: float) -> list[int]:
        """Stops a worker by SIGTERM, as for a deployment; kills it after a timeout."""
        return self._stop(self._choose_worker(target))

    def roll_forward(self, target: float, seconds: float) -> list[int]:
        """Replaces the workers one after the other by workers of this version."""
        return self._roll(None)

    def roll_back(self, target: float, seconds: float) -> list[int]:
        """Replaces the workers one after the other by workers of the previous version."""
        return self._roll(self._previous)

    def _roll(self, library: Library | None) -> list[int]:
        killed = []
        for number in range(len(self._workers)):
            if self._libraries[number] is not library:
                self._libraries[number] = library
                killed += self._stop(with_children(self._workers[number].process.pid))
        return killed

    def _stop(self, pids: list[int]) -> list[int]:
        """Returns the processes of a worker that had to be killed."""
        send_signal(pids[:1], signal.SIGTERM)
        until = time.monotonic() + STOP_SECONDS
        while any(worker.process.pid in pids for worker in self._running()):
            if time.monotonic() > until:
                return send_signal(pids, signal.SIGKILL)
            time.sleep(POLL_INTERVAL)
        return []

    def _choose_worker(self, target: float) -> list[int]:
        """Returns the ids of a worker's main process and of its pool."""
        running = self._running()
        if not running:
            return []
        return with_children(running[int(target * len(running))].process.pid)

    def _choose_child(self, target: float) -> int | None:
        children = [
            child for worker in self._running() for child in children_of(worker.process.pid)
        ]
        ended = {line["execution"] for line in self._ledger.read("effect")}
        busy = {
            line["pid"] for line in self._ledger.read("started") if line["execution"] not in ended
        }
        candidates = [child for child in children if child in busy] or children
        return candidates[int(target * len(candidates))] if candidates else None

    def _running(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.status == "running"]

    @staticmethod
    def _freeze(pids: list[int], seconds: float) -> list[int]:
        try:
            send_signal(pids, signal.SIGSTOP)
            time.sleep(seconds)
        finally:
            send_signal(pids, signal.SIGCONT)
        return pids

    def _note_groups(self) -> None:
        # Each worker leads a process group; orphaned pool processes remain in it.
        self._groups |= {worker.process.pid for worker in self._workers}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        for worker in self._workers:
            worker.process.wait()
