"""Duplicates that wait for the first one."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from celery_idempotent import Decision, Idempotency
from tests.labs.benchmarks.bench import own_server
from tests.labs.benchmarks.figure import Curves, Figure, Finding, Goal, Spread
from tests.labs.benchmarks.listener import Ear
from tests.labs.benchmarks.measure import Measure, Show

#: What clients send of their own accord when they connect.
GREETINGS = ("hello", "client", "script", "echo", "info", "ping")


class Waiting(Measure):
    """How late a waiter learns of the outcome, and what it asks of Redis until then.

    Eight keys are held at a time, each with one waiter that comes at once.
    """

    name = "wait"
    title = "a waiter is woken (on_conflict=wait)"

    KEYS = 8
    #: Seconds that the first one takes, and how often that is tried.
    HELD: ClassVar = {0.05: 12, 0.3: 8, 1.0: 4, 3.0: 2}

    def measure(self, show: Show) -> Finding:
        late: dict[float, list[float]] = {}
        sent: dict[float, float] = {}
        steps, done = sum(self.HELD.values()), 0
        with own_server() as server:
            idem = Idempotency(server.url, on_conflict="wait", wait_timeout=30)
            self._wait(idem, 0.05)
            for held, times in self.HELD.items():
                late[held] = []
                asked: list[float] = []
                for _ in range(times):
                    # Not in step with the looks of those who wait.
                    seconds = held * random.uniform(0.8, 1.2)
                    with Ear(server) as ear:
                        late[held] += self._wait(idem, seconds)
                    asks = sum(n for name, n in ear.commands.items() if name not in GREETINGS)
                    # Without those of the holder: begin and complete.
                    asked.append((asks / self.KEYS - 2) / seconds)
                    done += 1
                    show(done / steps)
                sent[held] = sum(asked) / len(asked)
            idem.executor.store.close()
        longest = max(self.HELD)
        spreads = {held: Spread.of(each) for held, each in late.items()}
        every = Spread.of([each for some in late.values() for each in some])
        return Finding(
            [
                Figure.spread_of("woken after complete", every, "ms", Goal(20)),
                Figure(
                    f"commands of a waiter, first one takes {longest:g} s",
                    sent[longest], "a second", Goal(5),
                ),
                *(
                    Figure.spread_of(f"woken, first one takes {held:g} s", spread, "ms")
                    for held, spread in spreads.items()
                ),
                *(
                    Figure(f"commands of a waiter, first one takes {held:g} s", each, "a second")
                    for held, each in sent.items() if held != longest
                ),
            ],
            [
                Curves(
                    "A waiter learns of the outcome", "ms late", "seconds that the first one takes",
                    {"on_conflict=wait": list(spreads.items())}, powers=True,
                )
            ],
            {"ms late": {str(held): each for held, each in late.items()}},
        )  # fmt: skip

    def _wait(self, idem: Idempotency, seconds: float) -> list[float]:
        """Milliseconds from each complete till its waiter has the value."""
        keys = [random.getrandbits(64) for _ in range(self.KEYS)]
        begun = threading.Barrier(2 * self.KEYS)
        completed: dict[int, float] = {}
        known: dict[int, float] = {}

        def hold(key: int) -> None:
            with idem.execution(key) as execution:
                begun.wait()
                time.sleep(seconds)
                execution.complete("done")
                completed[key] = time.perf_counter()

        def wait(key: int) -> None:
            begun.wait()
            with idem.execution(key) as execution:
                known[key] = time.perf_counter()
                assert execution.decision is Decision.REPLAY

        with ThreadPoolExecutor(2 * self.KEYS) as pool:
            for future in [pool.submit(do, key) for key in keys for do in (hold, wait)]:
                future.result()
        return [1000 * max(0.0, known[key] - completed[key]) for key in keys]
