"""Publishes canvases, injects faults, and judges."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from celery.canvas import Signature
from celery.exceptions import ChordError, NotRegistered
from celery.exceptions import TimeoutError as ResultTimeoutError
from celery.result import GroupResult
from click import ClickException
from redis.exceptions import ConnectionError as RedisConnectionError

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.record import State
from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.operations.calls import changes
from celery_idempotent.operations.cli.command import resolve_records
from labs.canvases.app import NAME, RESERVATION, database, make_app, rows
from labs.canvases.publisher import persist, publish_and_die
from labs.canvases.shapes import Shape, shapes
from labs.comparison.contestants import OURS, PEERS_IN_ENVIRONMENTS, PLAIN, Contestant
from labs.comparison.install import install_peers
from labs.rig.processes import children_of
from labs.rig.site import Site
from tests.apps import close
from tests.faults.proxy import Proxy
from tests.waiting import eventually
from tests.worker.harness import WorkerProcess

WORKERS, CHILDREN = 2, 3
#: Mean seconds between two publishes, and between two faults.
PUBLISH_INTERVAL, FAULT_INTERVAL = 0.08, 0.8
#: Seconds by which each packet between the others and Redis is delayed, until the next such fault.
JITTER = 0.02, 0.5
#: Shares: of the canvases that a process which is killed meanwhile also publishes, of the publishes
#: that follow a command of the operator, and of the new workers that do not know the task ``new``.
DYING_PUBLISHERS, OPERATIONS, OLD = 0.15, 0.3, 0.3
#: The publishers that are killed have connections of their own.
PROCESSES = multiprocessing.get_context("forkserver")
#: Seconds after which the messages of a killed worker are delivered again.
REDELIVERY = 3
#: The same for plain tasks of a worker that has idempotent ones.
VISIBILITY_TIMEOUT = 8
#: Seconds for all that was published to end after the last fault.
SETTLE = 90.0
#: A result that waits for a message that kombu took by BRPOP: the worker was killed before kombu
#: stored that the message is unacknowledged.
VANISHED = "PENDING, a message vanished in kombu"
UNIT_VANISHED = "lost, a message vanished in kombu"
#: Celery ends a chord with an error if its connection is cut while it collects the results.
NOT_JOINED = "wrong, Celery could not join the chord"
#: A process was killed within so many seconds after an effect, before its outcome was stored.
KILLED_AFTER, KILLED = 0.2, "again, killed after its effect"
EXPLAINED = {VANISHED, UNIT_VANISHED, NOT_JOINED, KILLED}
#: Callers with the result of a publisher that was killed after it had reserved the key.
NEVER_SENT = "callers with the result of a message that was never sent"
#: Celery discards the message of a task that the worker does not know.
UNKNOWN = "task unknown to its worker"
#: The id and the root of a task in a command that stores its message.
MESSAGE = re.compile(r'^(LPUSH|RPUSH|HSET unacked) .*?"id": "([^"]+)".*?"root_id": "([^"]+)"')


class Published(NamedTuple):
    kind: str
    shape: Shape
    #: Of each time that it was published.
    results: list[Any]


class Run(Site):
    """One seed with one contestant."""

    def __init__(
        self, seed: int, contestant: Contestant, kinds: list[str], folder: Path | None
    ) -> None:
        super().__init__(NAME, folder, contestant.python)
        self.seed, self.ours = seed, contestant is OURS
        self.redis_server = self.server()
        self.proxy = self.enter_context(Proxy(self.redis_server.url))
        url = f"{self.proxy.url.rpartition('/')[0]}/0"
        self.settings |= {
            "contestant": contestant.name,
            "broker_url": url,
            "result_backend": url,
            "database": str(self.folder / "rows.db"),
            "django_database": str(self.folder / "django.db"),
            "broker_transport_options": {
                "visibility_timeout": VISIBILITY_TIMEOUT if self.ours else REDELIVERY,
                # Without it, a worker may wait for ever on a connection that was cut.
                "socket_timeout": 10,
                "unacked_restore_interval": 1,
                "unacked_restore_throttle": 1,
            },
            "idempotency_redeliver_after": REDELIVERY,
        }
        database(self.settings["django_database"])
        self.app = make_app(self.settings)
        known = shapes(self.app, seed, "").keys()
        if unknown := set(kinds) - known:
            raise SystemExit(f"unknown kinds {sorted(unknown)}: use some of {sorted(known)}")
        self.redis = self.redis_server.client()
        #: How often a message was put in a queue and not taken from it, by its id and its root.
        self.queued: Counter[tuple[str, str]] = Counter()
        threading.Thread(target=self.follow_messages, daemon=True).start()
        self.kinds = kinds
        self.faults: Counter[str] = Counter()
        #: When each pool process was killed.
        self.killed: dict[int, float] = {}
        #: How often the operator has forgotten the call of a unit, or has run it again.
        self.operated: Counter[str] = Counter()
        for number in range(WORKERS):
            self.start(f"worker{number}", old=number == 0)

    def start(self, name: str, *, old: bool) -> WorkerProcess:
        return self.worker(name, "--concurrency", str(CHILDREN), old=old)

    def follow_messages(self) -> None:
        """Counts the messages in the queues, by the commands that Redis gets."""
        # Another user, since the connections of the default one are cut.
        self.redis.acl_setuser("judge", enabled=True, nopass=True, categories=["+@all"])
        redis = self.redis_server.client(username="judge", password="", socket_timeout=None)
        with contextlib.suppress(RedisConnectionError), redis.monitor() as monitor:
            for command in monitor.listen():
                if found := MESSAGE.match(command["command"]):
                    self.queued[found[2], found[3]] += -1 if found[1].startswith("HSET") else 1

    def inject(self, chance: random.Random, is_over: Callable[[], bool]) -> None:
        """Kills, cuts and delays until the end."""
        delayed = False
        while not is_over():
            time.sleep(chance.expovariate(1 / FAULT_INTERVAL))
            name = chance.choice([*self.workers])
            worker, kind = self.workers[name], chance.random()
            if worker.status == "exited":
                # Celery may end a worker whose connections are cut.
                self.faults["worker exited"] += 1
                self.replace_worker(name, chance)
            elif kind < 0.6:
                self.faults["child killed"] += 1
                children = children_of(worker.process.pid)
                if children:
                    victim = chance.choice(children)
                    self.killed[victim] = time.time()
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
            elif kind < 0.8:
                killed = kind < 0.7
                self.faults["worker killed" if killed else "worker restarted"] += 1
                if killed:
                    self.killed |= dict.fromkeys(children_of(worker.process.pid), time.time())
                (worker.kill if killed else worker.stop)()
                self.replace_worker(name, chance)
            elif kind < 0.9:
                self.faults["connections cut"] += 1
                self.redis.client_kill_filter(_type="normal", user="default", skipme=True)
            elif delayed := not delayed:
                self.faults["packets delayed"] += 1
                self.proxy.jitter(*JITTER)
            else:
                self.proxy.heal()
        self.proxy.heal()

    def replace_worker(self, name: str, chance: random.Random) -> None:
        worker = self.start(name, old=chance.random() < OLD)
        worker.ready()  # On a busy machine, there would never be a worker otherwise.

    def publish(self, chance: random.Random, canvases: int) -> list[Published]:
        published: list[Published] = []
        for number in range(canvases):
            made = shapes(self.app, self.seed, f"{number}")
            kind = chance.choice(self.kinds or [*made])
            if made[kind].reserved:
                self.die_publishing(f"{number}", kind, messages=0)
            elif chance.random() < DYING_PUBLISHERS:
                self.die_publishing(f"{number}", kind, messages=chance.choice([1, 1, 2, 3]))
            published.append(Published(kind, made[kind], []))
            for _ in range(chance.choice([1, 1, 2, 3])):
                again = [each for each in published if each.shape.operated]
                if again and chance.random() < OPERATIONS:
                    self.operate(chance.choice(again), force=chance.random() < 0.5)
                published[-1].results.append(persist(made[kind].publish))
                time.sleep(chance.expovariate(1 / PUBLISH_INTERVAL))
        for each in published:
            if each.shape.reserved:
                if self.ours:
                    self.wait_for_reservation(each.shape.reserved)
                each.results.append(persist(each.shape.publish))
        return published

    def wait_for_reservation(self, call: Signature) -> None:
        """Waits until the key of a call is not reserved."""
        read = partial(self.app.tasks[call.task].idempotency_record, *call.args)

        def is_over() -> bool:
            record = persist(read)
            return record is None or record.state is not State.RESERVED

        eventually(is_over, f"{call.args[0]} is not reserved", RESERVATION + SETTLE)

    def die_publishing(self, name: str, kind: str, messages: int) -> None:
        """Publishes a canvas in a process that is killed after so many messages."""
        arguments = (self.settings, self.seed, name, kind, messages)
        process = PROCESSES.Process(target=publish_and_die, args=arguments)
        process.start()
        process.join()
        self.faults["publisher killed"] += process.exitcode == -signal.SIGKILL

    def operate(self, published: Published, *, force: bool) -> None:
        """Forgets a call or runs it again, and publishes it once more."""
        command, call = published.shape.operated
        unit = call.args[0]
        if self.ours:
            self.operated[unit] += 1  # even if Redis no longer replies
            with contextlib.suppress(StoreUnavailableError):
                done = self.change(command, call, force=force)
                self.operated[unit] -= not done
                self.faults[command] += done
        published.results.append(persist(published.shape.publish))

    def change(self, command: str, call: Signature, *, force: bool) -> bool:
        """Runs `command` as the command line does; returns whether it has changed anything."""
        tasks = app_tasks.load(self.app)
        try:
            (target,) = resolve_records(tasks, (call.task, json.dumps(call.args)), None)
        except ClickException:  # absent
            return False
        target = target.with_outcome(tasks)
        if command == "forget":
            done = changes.forget(target, tasks, user="operator", force=force)
        else:
            done = changes.rerun(changes.find_ended(tasks, target), user="operator")
        return done in {changes.FORGOTTEN, changes.PUBLISHED}

    def ends(self) -> Counter[str]:
        """Returns how often each unit has run, and each row was written."""
        ends = Counter(name for name, _, _ in self.effects())
        for path in (self.settings["database"], self.settings["django_database"]):
            with database(path).connect() as connection:
                ends.update(connection.execute(rows.select()).scalars())
        return ends

    def effects(self) -> list[tuple[str, int, float]]:
        """Returns the units that have run, each with its process and time."""
        lines = self.ledger.read("effect")
        return [(line["name"], line["pid"], line["at"]) for line in lines]

    def explained(self, unit: str) -> bool:
        """Returns whether all processes but one were killed right after they ran `unit`."""
        gaps = [
            self.killed.get(pid, math.inf) - at for name, pid, at in self.effects() if name == unit
        ]
        return sum(not 0 <= gap < KILLED_AFTER for gap in gaps) <= 1 + self.operated[unit]

    def settle(self, published: list[Published]) -> None:
        """Waits until everything has run, and the broker has nothing left."""
        expected = {name for each in published for name in (*each.shape.units, *each.shape.rows)}

        def is_over() -> bool:
            left = any(self.redis.scan_iter("celery*", _type="list"))  # a queue for each priority
            return not left and not self.redis.hlen("unacked") and expected <= self.ends().keys()

        try:
            eventually(is_over, "everything has ended", SETTLE)
        except TimeoutError as error:
            print(f"    {error}; unacknowledged: {self.redis.hvals('unacked')}", flush=True)
            for worker in self.workers.values():  # Celery writes to its log where its threads are.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.process.pid, signal.SIGUSR1)

    def judge(self, published: list[Published]) -> Iterator[tuple[str, str, str]]:
        """Yields what is wrong: the kind of canvas, the fault, and the name of the unit."""
        ends, sent = self.ends(), {task_id for task_id, _ in self.queued}
        for kind, shape, results in published:
            if shape.reserved:
                self.faults[NEVER_SENT] += sum(each.id not in sent for each in results)
            for unit in (*shape.units, *shape.rows, *shape.optional, *shape.repeatable):
                least = len(results) if unit in shape.repeatable else unit not in shape.optional
                if ends[unit] < least:
                    vanished = any(map(self.vanished, results))
                    yield kind, UNIT_VANISHED if vanished else "lost", unit
                elif ends[unit] > 1 + self.operated[unit] and unit not in shape.repeatable:
                    what = KILLED if self.explained(unit) else "again"
                    yield kind, what, f"{unit} × {ends[unit]}"
            if not shape.same_result:
                continue
            outcomes = [self.outcome(result, shape.fails) for result in results]
            name = (*shape.units, *shape.rows, *shape.optional)[0]
            if shape.optional:
                self.faults[UNKNOWN] += outcomes.count(UNKNOWN)
                outcomes = [each for each in outcomes if each != UNKNOWN]
            bad = [each for each in outcomes if each.startswith(("PENDING", "wrong"))]
            yield from ((kind, each, name) for each in bad)
            if not bad and len({*outcomes}) > 1:
                yield kind, "results differ", f"{name}: {sorted({*outcomes})}"

    def vanished(self, result: Any) -> bool:
        """Returns whether a message that `result` needs is in no queue, and was not taken."""
        parts = {*self.parts(result)}
        return any(left and not parts.isdisjoint(ids) for ids, left in self.queued.items())

    def parts(self, result: Any) -> Iterator[str]:
        """Yields the ids of `result`, of its parents, and of their parts."""
        yield result.id
        for each in (result.parent, *(getattr(result, "results", None) or ())):
            if each is not None:
                yield from self.parts(each)

    def outcome(self, result: Any, fails: bool) -> str:
        try:
            # GroupResult.get misses results that were published before the call.
            results = result.results if isinstance(result, GroupResult) else [result]
            value = repr([each.get(timeout=5) for each in results])
        except ResultTimeoutError:
            return VANISHED if self.vanished(result) else "PENDING"
        except NotRegistered:
            return UNKNOWN
        except Exception as error:
            if "Join error" in str(error):
                return NOT_JOINED
            # A ChordError has the id of the part that failed, another one for each publish.
            text = "" if isinstance(error, ChordError) else f" {error}"
            return f"declined{text}" if fails and "Declined" in repr(error) else f"wrong: {error!r}"
        return f"wrong: {value}" if fails else value


def run(
    seed: int, canvases: int, kinds: list[str], logs: Path | None, contestant: Contestant = OURS
) -> Counter[str]:
    """Runs a seed; returns what was wrong."""
    chance, name = random.Random(seed), contestant.name
    # Each run has a folder of its own: rows of an earlier one would count again.
    with Run(seed, contestant, kinds, logs and logs / f"{name}-{seed}") as game:
        game.wait_until_ready()
        with ThreadPoolExecutor(1) as publisher:
            publishing = publisher.submit(game.publish, chance, canvases)
            # Not in a thread: Linux ends the workers with the thread that has started them.
            game.inject(random.Random(seed), publishing.done)
            published = publishing.result()
        game.settle(published)
        wrong = [*game.judge(published)]
        publishes = sum(len(each.results) for each in published)
        for each in published:
            each.results.clear()
        gc.collect()  # before their server ends
        close(game.app)
    units = sum(len(each.shape.units + each.shape.rows) for each in published)
    found = Counter(what for _, what, _ in wrong)
    print(
        f"seed {seed}, {name}: {canvases} canvases, {units} units, "
        f"{publishes} publishes, {dict(game.faults)}: "
        f"{dict(found) or 'each once'}",
        flush=True,
    )
    if contestant is OURS:
        for kind, what, unit in wrong[:20]:
            print(f"    {kind}: {what}: {unit}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m labs.canvases", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--canvases", type=int, default=150)
    parser.add_argument("--kinds", nargs="+", default=[], help="only these; by default all")
    parser.add_argument("--logs", type=Path, help="a folder for logs and rows")
    parser.add_argument("--ours", action="store_true", help="without plain Celery")
    parser.add_argument("--peers", action="store_true", help="also idemkit and fencekit")
    arguments = parser.parse_args()
    contestants: list[Contestant] = [OURS] if arguments.ours else [OURS, PLAIN]
    if arguments.peers:
        install_peers()
        contestants += PEERS_IN_ENVIRONMENTS
    failed = False
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        for contestant in contestants:
            wrong = run(seed, arguments.canvases, arguments.kinds, arguments.logs, contestant)
            failed |= bool(wrong.keys() - EXPLAINED) and contestant is OURS
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
