"""Bursts beside kills: each key's last run has the newest arguments, by a ledger of its own.

``python -m labs.newest burst 1 --seeds 20``: 8 processes publish 1,000 calls of 20 keys, while pool
processes, workers, publishers and the Redis of the records are killed. The broker is RabbitMQ,
since kombu's Redis transport loses a message whose receiver is killed at the wrong moment. The
ledger is another Redis: one list of what publishers and bodies did, whose order is the clock. A
publish during an outage reserves nothing and runs with its own arguments at any time, so its run is
left out.
``python -m labs.newest replace 1``: newer calls replace running ones; a step of the older call that
begins after the body of the newer one must fail.
``python -m labs.newest debounce``: what a publish costs in commands and bytes, with 10,000 keys.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_ready
from redis import Redis

from celery_idempotent import IdempotentTask
from celery_idempotent.errors import LeaseLostError
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis_server import RedisServer

PUBLISHERS, PUBLISHES, KEYS, WORKERS, RESERVATION_TTL = 8, 1000, 20, 2, 30
KILLS = ("child", "worker", "publisher", "store")
AOF = {"appendonly": "yes", "appendfsync": "always"}
STORE, OTHER, BROKER, TASK = (
    os.environ.get(f"NEWEST_{name}", "") for name in ("STORE", "OTHER", "BROKER", "TASK")
)

app = Celery("labs.newest", broker=BROKER, backend=OTHER)
app.conf.update(
    broker_transport_options={"confirm_publish": True}, worker_prefetch_multiplier=1,
    idempotency_redis_url=STORE,
    idempotency_redis_timeout=1, idempotency_redeliver_after=None, idempotency_lease=2,
    idempotency_reservation_ttl=RESERVATION_TTL,
)  # fmt: skip
ledger: Any = Redis.from_url(OTHER) if OTHER else None
options: Any = {"base": IdempotentTask, "bind": True, "idempotency_key": "{key}"}


def note(*event: Any) -> int:
    """Appends an event to the ledger, and returns its place."""
    return int(ledger.rpush("ledger", json.dumps(event)))


worker_ready.connect(lambda **_: note("ready", ""), weak=False)


@app.task(idempotency_until="started", **options)
def index(self: Any, key: str, number: int) -> None:
    note("run", key, number, self.idempotency.token)
    time.sleep(0.02)


@app.task(
    idempotency_until="finished", idempotency_on_conflict="replace", throws=(LeaseLostError,),
    **options,
)  # fmt: skip
def search(self: Any, key: str, number: int) -> None:
    token = self.idempotency.token
    note("run", key, number, token)
    for step in range(50):
        place = note("step", key, number, token)
        self.idempotency.step(str(step), time.sleep, 0.01)
        note("stepped", key, place, token)


@app.task(idempotency_until="started", idempotency_debounce=3600, **options)
def later(self: Any, key: str, number: int) -> None:
    """Waits for a quiet time."""


class Unreserved(logging.Handler):
    """Notes the publishes that have reserved nothing."""

    place = 0

    def emit(self, record: logging.LogRecord) -> None:
        if "published without a reservation" in record.getMessage():
            note("unreserved", "", self.place)


def publish(seed: int, number: int, name: str = TASK) -> None:
    """Publishes calls of random keys; `number` 0: one of each key."""
    rnd, unreserved = random.Random(f"{seed} {os.getpid()}"), Unreserved()
    logging.getLogger("celery_idempotent").addHandler(unreserved)
    keys = KEYS if name == "index" else 4
    for key in [rnd.randrange(keys) for _ in range(number)] or range(keys):
        unreserved.place = place = note("start", f"key {key}")
        app.tasks[f"labs.newest.{name}"].delay(f"key {key}", place)
        note("end", f"key {key}", place)
        time.sleep(rnd.uniform(0, 0.1))


class Site:
    """Workers and publishers as processes, and what kills them."""

    def __init__(self, stack: ExitStack, task: str) -> None:
        self.store = stack.enter_context(RedisServer.start(config=AOF))
        other = stack.enter_context(RedisServer.start(config={}))
        broker = stack.enter_context(RabbitMQ.start())
        urls = {"NEWEST_STORE": self.store.url, "NEWEST_OTHER": other.url, "NEWEST_TASK": task}
        urls["NEWEST_BROKER"] = broker.url
        self.app = Celery(broker=broker.url, set_as_current=False)
        self.environment, self.ledger = {**os.environ, **urls}, Redis.from_url(other.url)
        self.publishers: list[subprocess.Popen[bytes]] = []
        stack.callback(self.close)
        self.workers = [self.start_worker() for _ in range(WORKERS)]
        while self.ledger.llen("ledger") < WORKERS:
            time.sleep(0.1)

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", *command], env=self.environment, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def start_worker(self) -> subprocess.Popen[bytes]:
        name = ("--hostname", f"{time.monotonic_ns()}@here", "--without-mingle")
        return self.start("celery", "-A", "labs.newest", "worker", "--concurrency", "4", *name)

    def start_publisher(self, seed: int, number: int) -> None:
        self.publishers.append(self.start("labs.newest", "publish", str(seed), str(number)))

    def kill(self, rnd: random.Random, seed: int) -> str:
        what, number = rnd.choice(KILLS), rnd.randrange(WORKERS)
        pid = self.workers[number].pid
        running = [each for each in self.publishers if each.poll() is None]
        if what == "worker":
            kill_group(self.workers[number])
            self.workers[number] = self.start_worker()
        elif what == "child":
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[:1]:
                os.kill(int(child), signal.SIGKILL)
        elif what == "store":
            self.store.kill()
            time.sleep(rnd.uniform(0, 0.5))
            self.store.restart()
        elif running:
            kill_group(rnd.choice(running))
            self.start_publisher(seed, PUBLISHES // PUBLISHERS // 2)
        return what

    def wait(self) -> list[list[Any]]:
        """Returns the events once all publishers have ended and no message is left."""
        until = time.monotonic() + 180
        while any(each.poll() is None for each in self.publishers) or (left := self.left()):
            self.restart_ended_workers()
            if time.monotonic() > until:
                raise TimeoutError(f"messages are left: {left}")
            time.sleep(0.1)
        return [json.loads(event) for event in self.ledger.lrange("ledger", 0, -1)]

    def restart_ended_workers(self) -> None:
        """Starts ended workers again: Celery ends one if a child dies while the pool starts."""
        for number, worker in enumerate(self.workers):
            if worker.poll() is not None:
                self.workers[number] = self.start_worker()

    def left(self) -> list[Any]:
        """Returns the number of messages in the queue; if none, those in the workers."""
        with self.app.connection_for_read() as connection:
            if n := connection.default_channel.queue_declare("celery", passive=True).message_count:
                return [n]
        inspect = self.app.control.inspect(timeout=2, limit=WORKERS)
        for replies in (inspect.scheduled(), inspect.reserved(), inspect.active()):
            if len(replies or {}) < WORKERS:
                return ["a worker has not replied"]
            if left := [each for messages in replies.values() for each in messages]:
                return left
        return []

    def close(self) -> None:
        for process in (*self.workers, *self.publishers):
            if process.poll() is None:
                kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stale(events: list[list[Any]]) -> list[str]:
    """Returns the keys whose last run lacks a publish that returned before it began.

    Also those of which a publish was followed by no run, unless a publisher was killed in between.
    """
    unreserved = {rest[0] for what, _, *rest in events if what == "unreserved"}
    ended: dict[str, dict[int, int]] = defaultdict(dict)
    unfinished: dict[str, set[int]] = defaultdict(set)
    last: dict[str, tuple[int, int]] = {}
    for place, (what, key, *rest) in enumerate(events, 1):
        if what == "start":
            unfinished[key].add(place)
        elif what == "end":
            unfinished[key].discard(rest[0])
            ended[key][rest[0]] = place
        elif what == "run" and rest[0] not in unreserved:
            last[key] = place, rest[0]
    wrong = []
    for key, returned in ended.items():
        began, number = last.get(key, (0, 0))
        reserved = {start: end for start, end in returned.items() if start not in unreserved}
        known = returned.get(number, number)
        newer = [start for start, end in reserved.items() if start > known and end < began]
        missed = [start for start in reserved if start > began and not unfinished[key]]
        if newer or missed:
            wrong.append(f"{key}: run with {number} at {began}, without {newer or missed}")
    return wrong


def burst(seed: int) -> str:
    rnd, kills = random.Random(seed), Counter[str]()
    with ExitStack() as stack:
        site = Site(stack, "index")
        for _ in range(PUBLISHERS):
            site.start_publisher(seed, PUBLISHES // PUBLISHERS)
        while any(each.poll() is None for each in site.publishers):
            time.sleep(rnd.uniform(0.5, 2))
            kills[site.kill(rnd, seed)] += 1
        wrong = stale(site.wait())
        time.sleep(RESERVATION_TTL + 1)  # a publisher that died has left a reservation
        site.start_publisher(seed, 0)
        events = site.wait()
        wrong += stale(events)
    counts = Counter(what for what, *_ in events)
    return f"seed {seed}: {dict(counts)}, killed {dict(kills)}: {wrong or 'ok'}"


def replace(seed: int) -> str:
    with ExitStack() as stack:
        site = Site(stack, "search")
        for _ in range(PUBLISHERS):
            site.start_publisher(seed, 50)
        events = site.wait()
    newest: dict[str, list[tuple[int, int]]] = defaultdict(list)
    wrong = 0
    for place, (what, key, *rest) in enumerate(events, 1):
        if what == "run":
            newest[key].append((rest[1], place))
        elif what == "stepped":
            wrong += any(token > rest[1] and began < rest[0] for token, began in newest[key])
    counts = Counter(what for what, *_ in events)
    return f"seed {seed}: {dict(counts)}, {wrong} steps that began beside a newer run"


def debounce(_: int) -> str:
    lines = []
    with ExitStack() as stack:
        store, other = (stack.enter_context(RedisServer.start(config={})) for _ in range(2))
        app.conf.update(
            broker_url=other.url,
            result_backend=other.url,
            idempotency_redis_url=store.url,
            broker_transport_options={},
        )
        client = store.client()
        for turn in ("first", "second", "third"):
            client.config_resetstat()
            before, since = client.info("memory")["used_memory"], time.process_time()
            for key in range(10_000):
                later.delay(f"key {key}", 1)
            seconds, stats = time.process_time() - since, client.info("commandstats")
            calls = {n[8:]: s["calls"] for n, s in stats.items() if s["calls"] >= 5000}
            used = (client.info("memory")["used_memory"] - before) / 10_000
            lines.append(
                f"{turn} publish of each key: {calls}, {used:.0f} bytes a key, "
                f"{stats['cmdstat_evalsha']['usec_per_call']} µs a script, "
                f"{seconds * 100:.0f} µs of the publisher"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("burst", "replace", "debounce", "publish"))
    parser.add_argument("numbers", nargs="*", type=int, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.part == "publish":
        publish(*arguments.numbers)
        return
    first = arguments.numbers[0] if arguments.numbers else 1
    for seed in range(first, first + arguments.seeds):
        print(globals()[arguments.part](seed), flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
