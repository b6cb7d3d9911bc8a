"""The delay and the cost of waiting for the outcome of another execution."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from celery_idempotent import Decision, Idempotency
from celery_idempotent.core.store.run_sync import run_sync
from labs.benchmarks.bench import private_server
from labs.benchmarks.command_monitor import CommandMonitor
from labs.benchmarks.figure import Curves, Figure, Goal, MeasureResult, Spread
from labs.benchmarks.measure import Measure, ProgressCallback

#: Commands of connecting clients and of the monitor.
IGNORED_COMMANDS = ("hello", "client", "script", "echo", "info", "ping")


class Waiting(Measure):
    """The delay until a waiting duplicate returns the outcome, and the commands that it sends.

    Eight keys are processed at a time, each by one execution and one waiting duplicate.
    """

    name = "wait"
    title = "waiting duplicate (on_conflict=wait)"

    KEYS = 8
    #: The duration of the execution in seconds, and the number of repetitions.
    DURATIONS: ClassVar = {0.05: 12, 0.3: 8, 1.0: 4, 3.0: 2}

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        delays: dict[float, list[float]] = {}
        commands: dict[float, float] = {}
        steps, done = sum(self.DURATIONS.values()), 0
        with private_server() as server:
            idem = Idempotency(server.url, on_conflict="wait", wait_timeout=30)
            self._wait(idem, 0.05)
            for duration, repetitions in self.DURATIONS.items():
                delays[duration] = []
                rates: list[float] = []
                for _ in range(repetitions):
                    # Varied, so that completions do not coincide with polls.
                    seconds = duration * random.uniform(0.8, 1.2)
                    with CommandMonitor(server) as monitor:
                        delays[duration] += self._wait(idem, seconds)
                    sent = sum(
                        count
                        for name, count in monitor.commands.items()
                        if name not in IGNORED_COMMANDS
                    )
                    # Without begin and complete of the execution.
                    rates.append((sent / self.KEYS - 2) / seconds)
                    done += 1
                    progress(done / steps)
                commands[duration] = sum(rates) / len(rates)
            run_sync(idem.executor.store.aclose())
        longest = max(self.DURATIONS)
        spreads = {duration: Spread.from_values(each) for duration, each in delays.items()}
        overall = Spread.from_values([delay for each in delays.values() for delay in each])
        return MeasureResult(
            [
                Figure.from_spread("delay after complete", overall, "ms", Goal(20)),
                Figure(
                    f"commands per duplicate, execution takes {longest:g} s",
                    commands[longest], "/s", Goal(5),
                ),
                *(
                    Figure.from_spread(f"delay, execution takes {duration:g} s", spread, "ms")
                    for duration, spread in spreads.items()
                ),
                *(
                    Figure(f"commands per duplicate, execution takes {duration:g} s", rate, "/s")
                    for duration, rate in commands.items() if duration != longest
                ),
            ],
            [
                Curves(
                    "Delay of a waiting duplicate", "ms", "duration of the execution, seconds",
                    {"on_conflict=wait": list(spreads.items())}, logarithmic=True,
                )
            ],
            {"delay, ms": {str(duration): each for duration, each in delays.items()}},
        )  # fmt: skip

    def _wait(self, idem: Idempotency, seconds: float) -> list[float]:
        """Returns the milliseconds from each complete to the replay of its duplicate."""
        keys = [random.getrandbits(64) for _ in range(self.KEYS)]
        started = threading.Barrier(2 * self.KEYS)
        completed_at: dict[int, float] = {}
        replayed_at: dict[int, float] = {}

        def execute(key: int) -> None:
            with idem.execution(key) as execution:
                started.wait()
                time.sleep(seconds)
                execution.complete("done")
                completed_at[key] = time.perf_counter()

        def wait(key: int) -> None:
            started.wait()
            with idem.execution(key) as execution:
                replayed_at[key] = time.perf_counter()
                assert execution.decision is Decision.REPLAY

        with ThreadPoolExecutor(2 * self.KEYS) as pool:
            for future in [pool.submit(call, key) for key in keys for call in (execute, wait)]:
                future.result()
        return [1000 * max(0.0, replayed_at[key] - completed_at[key]) for key in keys]
