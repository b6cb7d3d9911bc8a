"""Publishes canvases, injects faults, and judges."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery, chain, chord, group
from celery.exceptions import TimeoutError as ResultTimeoutError
from redis import Redis

from celery_idempotent.testing.server import RedisServer
from labs.canvases.app import SETTINGS_VARIABLE, DeclinedError, make_app
from labs.chaos.workers import children_of
from tests.apps import close
from tests.waiting import eventually
from tests.worker.harness import WorkerProcess

WORKERS, CHILDREN = 2, 3
#: Mean seconds between two publishes, and between two faults.
PUBLISH_INTERVAL, FAULT_INTERVAL = 0.08, 0.8
#: Seconds after which the messages of a killed worker are delivered again.
REDELIVERY = 3
#: Seconds for all that was published to end after the last fault.
SETTLE = 90.0


class Shape(NamedTuple):
    """A canvas of one kind; `units` are the names of what has to run."""

    units: tuple[str, ...]
    publish: Callable[[], Any]
    fails: bool = False


def shapes(app: Celery, name: str, chance: random.Random) -> dict[str, Shape]:
    """Returns a canvas of each kind."""
    kinds = "work", "tail", "decline", "apologise", "again", "hand_over"
    work, tail, decline, apologise, again, hand_over = (
        app.tasks[f"canvases.{each}"] for each in kinds
    )
    seconds = [chance.uniform(0, 0.4) for _ in range(4)]
    names = [f"{name}.{letter}" for letter in "abcde"]
    works = [work.si(*each) for each in zip(names, seconds, strict=False)]
    first, last = names[0], names[4]
    inside = (f"{first} inside", f"{first} inside, tail")
    return {
        "plain": Shape((first,), works[0].delay),
        "countdown": Shape((first,), lambda: works[0].apply_async(countdown=1)),
        "link": Shape((first, last), lambda: works[0].apply_async(link=tail.s(last))),
        "errback": Shape(
            (first, last),
            lambda: decline.apply_async((first,), link_error=apologise.si(last)),
            fails=True,
        ),
        "chain": Shape(
            (first, names[1], last), lambda: chain(works[0], tail.s(names[1]), tail.s(last)).delay()
        ),
        "chord": Shape((*names[:3], last), lambda: chord(works[:3])(tail.s(last))),
        "group in a chain": Shape(
            (*names[:4], last),
            lambda: chain(works[0], group(works[1:4]), tail.s(last)).delay(),
        ),
        "retries": Shape((first, last), lambda: again.apply_async((first,), link=tail.s(last))),
        "replaced": Shape(
            (*inside, last), lambda: chain(hand_over.si(first, seconds[0]), tail.s(last)).delay()
        ),
    }


class Published(NamedTuple):
    kind: str
    units: tuple[str, ...]
    #: Of each time that it was published.
    results: list[Any]
    fails: bool


class Run:
    """One seed with one contestant."""

    def __init__(self, server: RedisServer, notes: RedisServer, folder: Path, plain: bool) -> None:
        url = f"{server.url.rpartition('/')[0]}/0"
        redelivery = {"unacked_restore_interval": 1, "unacked_restore_throttle": 1}
        self.settings = {
            "plain": plain,
            "broker_url": url,
            "result_backend": url,
            "ledger": notes.url,
            "broker_transport_options": {
                "visibility_timeout": REDELIVERY if plain else 3600,
                **redelivery,
            },
            "idempotency_redeliver_after": REDELIVERY,
        }
        self.app = make_app(self.settings)
        self.redis, self.notes = Redis.from_url(url), notes.client()
        self.redis.flushall()
        self.notes.flushall()
        self.faults: Counter[str] = Counter()
        self.folder, self.number = folder, 0
        self.workers = [self.start() for _ in range(WORKERS)]

    def start(self) -> WorkerProcess:
        self.number += 1
        name = f"canvases{self.number}"
        environment = {SETTINGS_VARIABLE: json.dumps(self.settings)}
        options = ("--concurrency", str(CHILDREN))
        log = self.folder / f"{name}.log"
        return WorkerProcess(name, options, environment, log, "labs.canvases.app")

    def inject(self, chance: random.Random, until: float) -> None:
        """Kills and cuts until the end."""
        while time.monotonic() < until:
            time.sleep(chance.expovariate(1 / FAULT_INTERVAL))
            number = chance.randrange(len(self.workers))
            worker, kind = self.workers[number], chance.random()
            if kind < 0.6:
                self.faults["child killed"] += 1
                children = children_of(worker.process.pid)
                if children:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(chance.choice(children), signal.SIGKILL)
            elif kind < 0.75:
                self.faults["worker killed"] += 1
                worker.kill()
                self.workers[number] = self.start()
            else:
                self.faults["connections cut"] += 1
                self.redis.client_kill_filter(_type="normal", skipme=True)

    def publish(self, chance: random.Random, canvases: int) -> list[Published]:
        published = []
        for number in range(canvases):
            made = shapes(self.app, f"{number}", chance)
            kind = chance.choice([*made])
            times = chance.choice([1, 1, 2, 3])
            results = []
            for _ in range(times):
                results.append(self.persist(made[kind].publish))
                time.sleep(chance.expovariate(1 / PUBLISH_INTERVAL))
            published.append(Published(kind, made[kind].units, results, made[kind].fails))
        return published

    @staticmethod
    def persist(publish: Callable[[], Any]) -> Any:
        """Publishes again if the connection is cut meanwhile, as callers do."""
        while True:
            try:
                return publish()
            except (OSError, ConnectionError):
                time.sleep(0.05)
            except Exception as error:
                if "onnection" not in f"{type(error).__name__} {error}":
                    raise
                time.sleep(0.05)

    def ends(self) -> Counter[str]:
        names: list[bytes] = self.notes.lrange("ends", 0, -1)  # type: ignore[assignment]
        return Counter(map(bytes.decode, names))

    def settle(self, published: list[Published]) -> None:
        """Waits until everything has run, and the broker has nothing left."""
        expected = {unit for each in published for unit in each.units}

        def is_over() -> bool:
            left = self.redis.llen("celery") + self.redis.hlen("unacked")
            return left == 0 and expected <= self.ends().keys()

        with contextlib.suppress(TimeoutError):
            eventually(is_over, "everything has ended", SETTLE)

    def judge(self, published: list[Published]) -> Iterator[tuple[str, str, str]]:
        """Yields what is wrong: the kind of canvas, what, and its name."""
        ends = self.ends()
        for each in published:
            for unit in each.units:
                if ends[unit] == 0:
                    yield each.kind, "lost", unit
                elif ends[unit] > 1:
                    yield each.kind, "again", f"{unit} × {ends[unit]}"
            values = {self.outcome(result, each.fails) for result in each.results}
            for value in values & {"PENDING", "wrong"}:
                yield each.kind, f"result {value}", each.units[0]
            if len(values) > 1 and not values & {"PENDING", "wrong"}:
                yield each.kind, "results differ", f"{each.units[0]}: {sorted(values)}"

    @staticmethod
    def outcome(result: Any, fails: bool) -> str:
        try:
            value = repr(result.get(timeout=5))
        except ResultTimeoutError:
            return "PENDING"
        except DeclinedError as error:
            return f"declined {error}" if fails else "wrong"
        except Exception as error:
            return f"declined {error}" if fails and "Declined" in repr(error) else "wrong"
        return "wrong" if fails else value

    def close(self) -> None:
        for worker in self.workers:
            worker.request_shutdown()
        for worker in self.workers:
            worker.stop()
        close(self.app)


def run(seed: int, canvases: int, *, plain: bool) -> tuple[int, Counter[str]]:
    """Runs a seed; returns how many units there were, and what was wrong."""
    chance = random.Random(seed)
    with (
        RedisServer.start() as server,
        RedisServer.start() as notes,
        tempfile.TemporaryDirectory() as folder,
    ):
        game = Run(server, notes, Path(folder), plain)
        try:
            for worker in game.workers:
                worker.ready()
            until = time.monotonic() + canvases * 2 * PUBLISH_INTERVAL
            with ThreadPoolExecutor(1) as publisher:
                publishing = publisher.submit(game.publish, chance, canvases)
                # Not in a thread: Linux ends the workers with the thread that has started them.
                game.inject(random.Random(seed), until)
                published = publishing.result()
            game.settle(published)
            wrong = [*game.judge(published)]
            publishes = sum(len(each.results) for each in published)
            for each in published:
                each.results.clear()
            gc.collect()  # before their server ends
        finally:
            game.close()
    units = sum(len(each.units) for each in published)
    found = Counter(what for _, what, _ in wrong)
    name = "plain Celery" if plain else "celery-idempotent"
    print(
        f"seed {seed}, {name}: {canvases} canvases, {units} units, "
        f"{publishes} publishes, {dict(game.faults)}: "
        f"{dict(found) or 'each once'}",
        flush=True,
    )
    if not plain:
        for kind, what, unit in wrong[:20]:
            print(f"    {kind}: {what}: {unit}", flush=True)
    return units, found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m labs.canvases", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--canvases", type=int, default=150)
    parser.add_argument("--ours", action="store_true", help="without plain Celery")
    arguments = parser.parse_args()
    failed = False
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        for plain in (False,) if arguments.ours else (False, True):
            _, wrong = run(seed, arguments.canvases, plain=plain)
            failed |= bool(wrong) and not plain
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
