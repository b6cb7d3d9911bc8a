"""``python -m tests.labs.chaos.run``: one contestant under one schedule, in its own process.

It prints how many callers have their answer, a number a line, and leaves in its folder all that was
seen: the ledger, the downstream system, the workers' logs and ``seen.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from celery import Celery
from celery.states import READY_STATES

from celery_idempotent.testing.process import ServerError
from celery_idempotent.testing.server import RedisServer
from tests.labs.chaos import schedule
from tests.labs.chaos.app import CONFIG_VARIABLE, QUEUE, AppConfig, make_app
from tests.labs.chaos.broker import Broker, broker_for
from tests.labs.chaos.downstream import Downstream
from tests.labs.chaos.schedule import LEASE, Call, Fault, Schedule
from tests.labs.chaos.stores import Store, store_for
from tests.labs.chaos.workers import Crew
from tests.labs.comparison.contestants import OURS
from tests.labs.outages.ledger import Ledger

#: Seconds between two looks at the workers.
POLL_INTERVAL = 0.05
#: … and at what callers are told.
ASK_EVERY = 0.5
#: Longest wait for the last answer, in seconds; while nothing happens any more at all; and when
#: the broker has nothing left, either.
PATIENCE = 90.0
PATIENCE_IN_SILENCE = 30.0
PATIENCE_FOR_NOTHING = 8.0
#: Nothing has happened for so long: it is over.
SILENCE = 1.5
#: Peers may hang, and are known to. Ours may not.
PATIENCE_WITH_PEERS = 40.0
SILENCE_OF_PEERS = 12.0
#: Seconds until a publish that the broker did not take is tried again.
AGAIN = 0.1

#: Exit code: servers did not start, or did not take a fault as they should; nothing to judge.
NOT_STRUCK = 3

#: Of celery-idempotent, so that what it waits for is as short as the schedule.
IMPATIENT = {
    "idempotency_redis_timeout": 1.0,
    "idempotency_wait_replicas_timeout": 0.5,
    "idempotency_breaker_max_delay": 2.0,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.labs.chaos.run", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("contestant")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--part", type=int, default=1, help="one order of so many")
    asked = parser.parse_args()
    whole = schedule.make(asked.seed, asked.tasks)
    try:
        run(whole.part(asked.part), asked.contestant, asked.folder)
    except ServerError as error:
        _give_up(str(error))
    # A publish of a contestant's that hangs must not keep anybody waiting.
    os._exit(0)


def run(planned: Schedule, contestant: str, folder: Path) -> None:
    """Live through `planned`; what was seen is in `folder` afterwards."""
    ours = contestant == OURS.name
    with ExitStack() as servers, ThreadPoolExecutor(3) as pool:
        made_store = pool.submit(store_for, planned.shape, knows_all=ours)
        made_broker = pool.submit(broker_for, planned.shape)
        results = servers.enter_context(RedisServer.start())
        store = servers.enter_context(made_store.result())
        broker = servers.enter_context(made_broker.result())
        settings = {
            **broker.settings,
            "result_backend": results.url,
            "task_default_queue": QUEUE,
            "worker_prefetch_multiplier": 1,
            "broker_connection_retry_on_startup": True,
            "broker_connection_max_retries": None,
            "task_publish_retry_policy": {"interval_step": 0.1, "interval_max": 0.5},
        }
        if ours:
            settings |= {
                **IMPATIENT,
                **store.settings,
                "idempotency_wait_replicas": planned.shape.wait_replicas,
            }
        downstream = servers.enter_context(Downstream(folder / "downstream.sqlite"))
        config = AppConfig(contestant, str(folder), store.url, downstream.port, LEASE, settings)
        scene = _Scene(planned, config, store, broker)
        if ours:
            seen = scene.play(PATIENCE, PATIENCE_IN_SILENCE)
        else:
            seen = scene.play(PATIENCE_WITH_PEERS, SILENCE_OF_PEERS)
    (folder / "seen.json").write_text(json.dumps(seen))


class _Scene:
    """Client, workers and fate, at the same time."""

    def __init__(self, planned: Schedule, config: AppConfig, store: Store, broker: Broker) -> None:
        self._planned = planned
        self._config = config
        self._app: Celery = make_app(config)
        self._ledger: Ledger = config.ledger()
        self._broker = broker
        self._crew = Crew(config, planned.shape, self._ledger)
        self._faults = _faults(self._crew, store, broker)
        #: One fault at a time each.
        self._struck = {"store": threading.Lock(), "broker": threading.Lock()}
        #: What callers wait for, by the id of their result: when they called, and for which order.
        self._waiting: dict[str, tuple[float, str]] = {}
        self._told: list[dict[str, Any]] = []
        self._refused = 0
        self._over = threading.Event()

    def play(self, timeout: float, silence: float) -> dict[str, Any]:
        """All of it; what callers were told.

        Args:
            patience: longest wait for the last answer, in seconds.
            silence: how long nothing may happen before nobody waits any more.
        """
        with self._crew:
            self._crew.wait_until_ready()
            self._began_at = time.time()
            doing = [threading.Thread(target=self._publish, daemon=True)]
            doing += [
                threading.Thread(target=self._strike, args=(blow,), daemon=True)
                for blow in self._planned.blows
            ]
            for thread in doing:
                thread.start()
            self._supervise_until(lambda: not any(thread.is_alive() for thread in doing), timeout)
            self._calm_at = time.time()
            self._supervise_until(lambda: self._settled(silence), timeout)
            self._over.set()
            self._ask_again()
        return {
            "began_at": self._began_at,
            "calm_at": self._calm_at,
            "ended_at": time.time(),
            "restarts": self._crew.restarts,
            "refused": self._refused,
            "left": self._broker.messages(),
            "told": self._told,
            "untold": [
                {"task_id": task_id, "at": at, "order": order}
                for task_id, (at, order) in self._waiting.items()
            ],
        }

    def _supervise_until(self, over: Callable[[], bool], seconds: float) -> None:
        # Workers die with the thread that has started them, which is this one.
        last = self._planned.calls[-1].at
        deadline = time.monotonic() + last + seconds
        asked_at = 0.0
        while not over() and time.monotonic() < deadline:
            self._crew.supervise()
            if time.monotonic() > asked_at + ASK_EVERY:
                self._ask()
                asked_at = time.monotonic()
            time.sleep(POLL_INTERVAL)

    def _settled(self, silence: float) -> bool:
        quiet = time.time() - self._ledger.changed_at()
        empty = self._broker.messages() == 0
        if not self._waiting:
            return empty and quiet > SILENCE
        nothing_comes = empty and self._broker.tells_all
        return quiet > (PATIENCE_FOR_NOTHING if nothing_comes else silence)

    # The client

    def _publish(self) -> None:
        task = self._app.tasks["chaos.charge"]
        for call in self._planned.calls:
            self._over.wait(max(0.0, self._began_at + call.at - time.time()))
            self._publish_one(task, call)

    def _publish_one(self, task: Any, call: Call) -> None:
        """Until it is accepted: what is not accepted, nobody can lose."""
        called_at = time.time()
        while not self._over.is_set():
            try:
                result = task.apply_async(
                    (call.order, call.seconds, call.ending), task_id=call.task_id
                )
            except Exception as error:
                if type(error).__name__ == "AlreadyQueued":
                    self._refused += 1
                    return
                self._over.wait(AGAIN)
            else:
                self._ledger.write("called", order=call.order, task_id=result.id)
                self._waiting[result.id] = called_at, call.order
                return

    def _ask(self) -> None:
        for task_id in list(self._waiting):
            answer = self._app.backend.get_task_meta(task_id)
            if answer["status"] in READY_STATES:
                at, order = self._waiting.pop(task_id)
                told = f"{answer['status']} {answer['result']}"
                line = {"task_id": task_id, "order": order, "called_at": at, "told": told}
                self._told.append(line | {"at": time.time()})
        print(len(self._told), flush=True)

    def _ask_again(self) -> None:
        """What callers were told must be what they are told in the end."""
        for line in list(self._told):
            answer = self._app.backend.get_task_meta(line["task_id"])
            told = f"{answer['status']} {answer['result']}"
            if told != line["told"]:
                self._told.append(line | {"told": told})

    # Fate

    def _strike(self, blow: Fault) -> None:
        self._over.wait(max(0.0, self._began_at + blow.at - time.time()))
        trigger = self._faults.get(blow.kind)
        lock = self._struck.get(blow.kind.split()[0], threading.Lock())
        pids: list[int] | None = []
        with lock:
            at = time.time()
            if trigger is not None:
                try:
                    pids = trigger(blow.aim, blow.seconds)
                except ServerError as error:
                    _give_up(f"{blow.kind}: {error}")
        self._ledger.write("struck", kind=blow.kind, at=at, until=time.time(), pids=pids or [])


def _give_up(why: str) -> None:
    """Nobody can be judged who goes on with servers that are not whole."""
    print(why, file=sys.stderr, flush=True)
    os._exit(NOT_STRUCK)


def _faults(
    workers: Crew, store: Store, broker: Broker
) -> dict[str, Callable[[float, float], list[int] | None]]:
    """What each kind of blow is here; one that cannot be had here is left out."""
    faults: dict[str, Any] = {
        "child killed": workers.kill_child,
        "worker killed": workers.kill_worker,
        "parent killed": workers.kill_parent,
        "child frozen past the lease": workers.freeze_child,
        "worker frozen past the lease": workers.freeze_worker,
        "worker frozen": workers.freeze_worker,
        "worker told to stop": workers.stop_worker,
        "store killed": store.kill,
        "store connections cut": store.cut,
        "store frozen": store.freeze,
        "scripts flushed": store.flush_scripts,
        "broker connections cut": broker.cut,
        "broker in a black hole": broker.black_hole,
        "publish replies lost": broker.lose_publish_replies,
    }
    for kind, name in (
        ("store in a black hole", "black_hole"),
        ("store replies delayed", "delay_replies"),
        ("store replies lost", "lose_replies"),
        ("store clock set back", "set_clock_back"),
        ("store clock set forward", "set_clock_forward"),
    ):
        if hasattr(store, name):
            faults[kind] = getattr(store, name)
    return faults


if __name__ == "__main__":
    assert CONFIG_VARIABLE not in os.environ
    main()
