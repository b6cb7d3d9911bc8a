"""The workers, and how they are struck; whoever ends is started again, as by a service manager."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from tests.labs.chaos.app import CONFIG_VARIABLE, NAME, AppConfig
from tests.labs.chaos.schedule import Shape
from tests.labs.outages.ledger import Ledger
from tests.worker.harness import WorkerProcess

#: Seconds that a worker may take to stop, and between two looks whether it has.
STOP_SECONDS = 8.0
POLL_INTERVAL = 0.1


class Crew:
    """All workers; leaving the ``with`` block ends them.

    Every fault returns the processes that it struck.
    """

    def __init__(self, config: AppConfig, shape: Shape, ledger: Ledger) -> None:
        self._ledger = ledger
        self._groups: set[int] = set()
        self.restarts = 0
        self._workers = [
            WorkerProcess(
                f"w{number}",
                ("--concurrency", str(shape.children), "--queues", "chaos"),
                {CONFIG_VARIABLE: config.to_json()},
                Path(config.folder) / f"worker-{number}.log",
                app=NAME,
            )
            for number in range(1, shape.workers + 1)
        ]
        self._note_groups()

    def wait_until_ready(self) -> None:
        """Until all take messages."""
        for worker in self._workers:
            worker.ready()

    def supervise(self) -> None:
        """Start those again that have ended."""
        for worker in self._workers:
            if worker.status == "exited":
                worker.start()
                self.restarts += 1
        self._note_groups()

    # Faults

    def kill_child(self, aim: float, seconds: float) -> list[int]:
        """SIGKILL to one process of a pool, rather to one that works."""
        child = self._aim_at_child(aim)
        return _strike([child], signal.SIGKILL) if child else []

    def kill_worker(self, aim: float, seconds: float) -> list[int]:
        """SIGKILL to a worker and its pool, as when a host dies."""
        return _strike(self._aim_at_worker(aim), signal.SIGKILL)

    def kill_parent(self, aim: float, seconds: float) -> list[int]:
        """SIGKILL to a worker's main process; its pool goes with it, by Celery's care."""
        pids = self._aim_at_worker(aim)
        _strike(pids[:1], signal.SIGKILL)
        return pids

    def freeze_child(self, aim: float, seconds: float) -> list[int]:
        """Stop one process of a pool, rather one that works, and let it go on later."""
        child = self._aim_at_child(aim)
        return self._freeze([child] if child else [], seconds)

    def freeze_worker(self, aim: float, seconds: float) -> list[int]:
        """Stop a worker and its pool, and let them go on later."""
        return self._freeze(self._aim_at_worker(aim), seconds)

    def stop_worker(self, aim: float, seconds: float) -> list[int]:
        """A warm shutdown, as for a deploy; after a while SIGKILL, as by a service manager."""
        pids = self._aim_at_worker(aim)
        _strike(pids[:1], signal.SIGTERM)
        until = time.monotonic() + STOP_SECONDS
        while any(worker.process.pid in pids for worker in self._running()):
            if time.monotonic() > until:
                return _strike(pids, signal.SIGKILL)
            time.sleep(POLL_INTERVAL)
        return []

    # Who

    def _aim_at_worker(self, aim: float) -> list[int]:
        """A worker's main process, then those of its pool."""
        running = self._running()
        if not running:
            return []
        parent = running[int(aim * len(running))].process.pid
        return [parent, *_children(parent)]

    def _aim_at_child(self, aim: float) -> int | None:
        children = [child for worker in self._running() for child in _children(worker.process.pid)]
        over = {line["execution"] for line in self._ledger.read("done")}
        busy = {line["pid"] for line in self._ledger.read("begun") if line["execution"] not in over}
        targets = [child for child in children if child in busy] or children
        return targets[int(aim * len(targets))] if targets else None

    def _running(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.status == "running"]

    @staticmethod
    def _freeze(pids: list[int], seconds: float) -> list[int]:
        try:
            _strike(pids, signal.SIGSTOP)
            time.sleep(seconds)
        finally:
            _strike(pids, signal.SIGCONT)
        return pids

    def _note_groups(self) -> None:
        # Each worker leads a group, which outlives it where its pool is orphaned.
        self._groups |= {worker.process.pid for worker in self._workers}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        for worker in self._workers:
            worker.process.wait()


def _strike(pids: list[int], signum: signal.Signals) -> list[int]:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
    return pids


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []
