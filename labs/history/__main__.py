"""Records histories under faults, and checks them."""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from labs.chaos.stores import Sentinels, Single, Store
from labs.history import client
from labs.history.checker import Verdict, check
from labs.history.operation import NEVER, Operation

Kinds = dict[str, tuple[float, float]]

#: Each fault, with its shortest and longest duration in seconds.
FAULTS: Kinds = {
    "cut": (0.1, 0.4),
    "freeze": (0.2, 1.2),
    "flush_scripts": (0.2, 0.5),
    "black_hole": (0.2, 1.2),
    "delay_replies": (0, 0),
    "lose_replies": (0, 0),
}
FAILOVER: Kinds = {"kill": (0.5, 1), "cut": (0.1, 0.3), "freeze": (0.2, 0.9)}


class Deployment(NamedTuple):
    """A store and its faults."""

    make: Callable[[], Store]
    faults: Kinds
    options: Mapping[str, Any] = {}
    #: Whether the server's clock never goes back.
    monotonic: bool = False
    #: Whether the faults lose acknowledged writes, so that the replies have no explanation.
    loses: bool = False


DEPLOYMENTS = {
    "undisturbed": Deployment(Single, {}, monotonic=True),
    "single": Deployment(Single, {**FAULTS, "kill": (0.1, 0.8)}, monotonic=True),
    "clock": Deployment(Single, {**FAULTS, "set_clock_back": (0, 0), "set_clock_forward": (0, 0)}),
    "sentinel": Deployment(Sentinels, FAILOVER),
    "wait_replicas": Deployment(Sentinels, FAILOVER, {"wait_replicas": 1}),
    "flushed": Deployment(Single, {"flush": (0, 0)}, monotonic=True, loses=True),
}
PROCESSES = 6
#: Not by fork: Celery closes the connections of the parent's apps in each fork, and may wait for a
#: reply that another fork has read.
CONTEXT = multiprocessing.get_context("forkserver")
#: Seconds between two faults.
INTERVAL = (0.3, 1.5)


def record(name: str, seed: int, seconds: float) -> tuple[list[Operation], Counter[str]]:
    """Runs the clients while faults are injected; returns their calls and the faults."""
    deployment = DEPLOYMENTS[name]
    chance, faults = random.Random(seed), Counter[str]()
    with deployment.make() as store:
        pipes, processes = [], []
        connection = dict(store.settings.get("idempotency_redis_options", {}))
        options = {**deployment.options, "options": connection}
        ready = CONTEXT.Barrier(PROCESSES + 1)
        for number in range(PROCESSES):
            receiving, sending = multiprocessing.Pipe(duplex=False)
            arguments = store.url, options, seed * 1000 + number, seconds, ready, sending
            process = CONTEXT.Process(target=client.run, args=arguments)
            process.start()
            sending.close()
            pipes.append(receiving)
            processes.append(process)
        ready.wait(60)
        until = time.monotonic() + seconds
        received: list[list[Operation]] = []
        reader = threading.Thread(target=lambda: received.extend(pipe.recv() for pipe in pipes))
        reader.start()
        while deployment.faults and (now := time.monotonic()) < until - 2:
            kind = chance.choice([*deployment.faults])
            seconds = chance.uniform(*deployment.faults[kind])
            getattr(store, kind)(chance.random(), seconds)
            faults[kind] += 1
            time.sleep(min(max(0.0, until - 2 - now), chance.uniform(*INTERVAL)))
        reader.join()
        for process in processes:
            process.join()
    return [operation for operations in received for operation in operations], faults


def verdicts(name: str, history: list[Operation]) -> list[Verdict]:
    """Returns the verdict on each key."""
    return [*check(history, monotonic=DEPLOYMENTS[name].monotonic)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m labs.history", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--only", action="append", choices=[*DEPLOYMENTS])
    arguments = parser.parse_args()
    failed = False
    for name in arguments.only or DEPLOYMENTS:
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            failed |= not run(name, seed, arguments.seconds)
    return int(failed)


def run(name: str, seed: int, seconds: float) -> bool:
    """Records and checks one history; returns whether the verdict is the expected one."""
    history, faults = record(name, seed, seconds)
    started_at = time.monotonic()
    found = verdicts(name, history)
    wrong = [verdict for verdict in found if verdict.counterexample]
    undecided = sum(verdict.undecided for verdict in found)
    is_expected = bool(wrong) == DEPLOYMENTS[name].loses
    print(
        f"{'✓' if is_expected else '✗'} {name}, seed {seed}: {len(history):,} calls, "
        f"{sum(call.returned == NEVER for call in history)} without a reply, "
        f"{faults.total()} faults, {len(found)} keys, {len(wrong)} unexplained, "
        f"{undecided} undecided ({sum(verdict.visited for verdict in found):,} configurations, "
        f"{time.monotonic() - started_at:.0f} s)",
        flush=True,
    )
    if not is_expected:
        file = Path(tempfile.gettempdir()) / f"history-{name}-{seed}.pickle"
        file.write_bytes(pickle.dumps(history))
        print(f"  the history is in {file}")
    for verdict in wrong[: 1 if is_expected else 3]:
        print(f"  {verdict.key}:\n{verdict.counterexample}", flush=True)
    return is_expected


if __name__ == "__main__":
    sys.exit(main())
