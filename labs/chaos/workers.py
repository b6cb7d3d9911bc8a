"""The workers and their faults; workers that exit are restarted, as by a service manager."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from labs.chaos.app import QUEUES
from labs.chaos.schedule import Shape
from labs.rig.processes import children_of, send_signal, with_children
from labs.rig.site import Site
from tests.packaging.versions.library import Library
from tests.worker.harness import WorkerProcess

#: Longest shutdown of a worker, and interval of checks, in seconds.
STOP_SECONDS = 8.0
POLL_INTERVAL = 0.1


class Workers:
    """The workers of a site.

    Every fault returns the ids of the affected processes.

    Args:
        previous: a version of the library, which every other worker runs at first.
    """

    def __init__(self, site: Site, shape: Shape, previous: Library | None = None) -> None:
        self._site, self._previous = site, previous
        self._options = ("--concurrency", f"{shape.children}", "--queues", ",".join(QUEUES))
        self.restarts = 0
        #: The version of each worker; None: this one.
        self._libraries = {
            f"worker-{number + 1}": previous if number % 2 else None
            for number in range(shape.workers)
        }
        for name in self._libraries:
            self._start(name)

    def _start(self, name: str) -> None:
        self._site.worker(name, *self._options, library=self._libraries[name])

    def assert_fused_completion(self) -> None:
        """Checks in the log of each worker that every task has fused completion."""
        for worker in self._site.workers.values():
            log = worker.logs()
            assert "fused completion off" not in log, log

    def supervise(self) -> None:
        """Starts those that have exited, as a service manager does."""
        for name, worker in list(self._site.workers.items()):
            if worker.status == "exited":
                self._start(name)
                self.restarts += 1

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
        for name in self._libraries:
            if self._libraries[name] is not library:
                self._libraries[name] = library
                killed += self._stop(with_children(self._site.workers[name].process.pid))
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
        ledger = self._site.ledger
        ended = {line["execution"] for line in ledger.read("effect")}
        busy = {line["pid"] for line in ledger.read("started") if line["execution"] not in ended}
        candidates = [child for child in children if child in busy] or children
        return candidates[int(target * len(candidates))] if candidates else None

    def _running(self) -> list[WorkerProcess]:
        workers = list(self._site.workers.values())
        return [worker for worker in workers if worker.status == "running"]

    @staticmethod
    def _freeze(pids: list[int], seconds: float) -> list[int]:
        try:
            send_signal(pids, signal.SIGSTOP)
            time.sleep(seconds)
        finally:
            send_signal(pids, signal.SIGCONT)
        return pids
