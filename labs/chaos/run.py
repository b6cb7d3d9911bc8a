"""``python -m labs.chaos.run``: runs one contestant with one schedule, in its own process.

It writes the evidence into its folder: the ledger, the workers' logs and ``observations.json``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

from celery import Celery
from celery.states import READY_STATES
from redis.exceptions import RedisError

from celery_idempotent.core.task.publish.result import RecordResult
from celery_idempotent.errors import StoreUnavailableError
from labs.chaos import downstream, schedule
from labs.chaos.app import FORGOTTEN, NAME, QUEUE, TASKS, make_app, unit_of, until_of
from labs.chaos.schedule import ROLLED_BACK, ROLLED_FORWARD, Fault, Schedule
from labs.chaos.servers import Broker, Database, Proxied, Single, Store, broker_for, store_for
from labs.chaos.workers import Workers
from labs.comparison.contestants import OURS, find_contestant
from labs.rig.late import Late, Packet
from labs.rig.site import DURABLE, Site
from labs.rig.worker import plans_of
from tests.packaging.versions.library import Library
from tests.servers.program import ServerError
from tests.servers.redis_server import RedisServer

#: The other contestants get every n-th order, with all its calls, and the same faults.
ORDERS_OF_PEERS_ONE_IN = 4
#: Intervals at which workers and results are checked, in seconds.
POLL_INTERVAL = 0.05
RESULT_POLL_INTERVAL = 0.5
#: Longest wait for the last result, in seconds; and the longest time without any activity, with
#: and without messages in the broker.
RESULT_TIMEOUT = 90.0
QUIET_TIMEOUT = 30.0
QUIET_TIMEOUT_WITHOUT_MESSAGES = 8.0
#: A run with all results ends after this time without activity.
SETTLED_AFTER = 1.5
#: Runs of the other contestants may hang.
RESULT_TIMEOUT_OF_PEERS = 40.0
QUIET_TIMEOUT_OF_PEERS = 12.0
#: Seconds until a failed publish is repeated.
PUBLISH_RETRY_INTERVAL = 0.1

#: Exit code: servers did not start, or did not recover from a fault.
EXIT_SERVERS_FAILED = 3

#: Timeouts of celery-idempotent that fit the schedule.
SHORT_TIMEOUTS = {
    "idempotency_redis_timeout": 1.0,
    "idempotency_redeliver_after": 4.0,
}


@dataclass(frozen=True)
class RunSpec:
    """One contestant and one seed."""

    seed: int
    contestant: str
    tasks: int
    #: Whether effects are rows in PostgreSQL; for celery-idempotent only.
    transaction: bool = False
    #: A version whose workers take turns with those of this one: its name and its folder.
    previous: tuple[str, str] | None = None

    @property
    def is_ours(self) -> bool:
        return self.contestant == OURS.name

    @property
    def schedule(self) -> Schedule:
        """The schedule of the run; the other contestants get a part of the orders."""
        whole = schedule.make(
            self.seed,
            self.tasks,
            transaction=self.transaction,
            versions=self.previous is not None,
        )
        return whole.with_orders(1 if self.is_ours else ORDERS_OF_PEERS_ONE_IN)

    @property
    def title(self) -> str:
        """The contestant, where its effects are, and the other version."""
        other = f"-{self.previous[0]}" if self.previous else ""
        return f"{self.contestant}{'-transaction' if self.transaction else ''}{other}"

    @property
    def command(self) -> str:
        """The command that repeats it."""
        variant = "TRANSACTION=1" if self.transaction else "OURS=1"
        if self.previous:
            return f"make versions SEED={self.seed} TASKS={self.tasks} OLD={self.previous[0]}"
        return f"make chaos SEED={self.seed} TASKS={self.tasks} {variant}"


def main() -> None:
    folder, spec = sys.argv[1:]
    try:
        run(RunSpec(**json.loads(spec)), Path(folder))
    except ServerError as error:
        _exit_servers_failed(str(error))
    # A contestant's publish may hang; its thread must not keep the process running.
    os._exit(0)


def run(spec: RunSpec, folder: Path) -> None:
    """Runs the schedule of `spec`; writes the evidence into `folder`."""
    shape, ours = spec.schedule.shape, spec.is_ours
    python = find_contestant(spec.contestant).python
    with Site(NAME, folder, python) as site, ThreadPoolExecutor(3) as pool:
        starting_store = pool.submit(store_for, shape, any_store=ours)
        starting_broker = pool.submit(broker_for, shape)
        database = None
        if shape.transaction:
            database = site.enter_context(Database(idle_timeout=shape.idle_timeout))
            site.settings["lab_database"] = database.url
        else:
            site.settings["lab_downstream"] = site.server().url
        store = site.enter_context(starting_store.result())
        broker = site.enter_context(starting_broker.result())
        # The other libraries keep a result backend without faults.
        in_store = ours and shape.results_in_store
        results: Proxied
        if in_store:
            assert isinstance(store, Single)
            results = store
        else:
            results = site.enter_context(Proxied(RedisServer.start(config=DURABLE)))
        site.settings |= {
            "lab_contestant": spec.contestant,
            "lab_store": store.url,
            "broker_url": broker.url,
            "broker_transport_options": broker.own_options if ours else broker.options,
            "result_backend": results.url,
            "task_default_queue": QUEUE,
            "worker_prefetch_multiplier": 1,
            "broker_connection_max_retries": None,
            "task_publish_retry_policy": {"interval_step": 0.1, "interval_max": 0.5},
        }
        if ours:
            site.settings |= {
                **SHORT_TIMEOUTS,
                **store.settings,
                "idempotency_wait_replicas": shape.wait_replicas,
            }
        if shape.transaction or in_store:
            # Else Celery fails a task whose result it cannot store at once.
            site.settings["result_backend_always_retry"] = True
        if shape.runs_without_store:
            site.settings["idempotency_on_store_error"] = "run"
        observations = _Run(spec, site, store, broker, results, database).run()
        observations["effects"] = database.effects() if database else []
        observations["requests"] = (
            {} if database else downstream.requests(site.settings["lab_downstream"])
        )
    (folder / "observations.json").write_text(json.dumps(observations))


class _Run:
    """Publishes calls, injects faults and supervises workers at the same time."""

    def __init__(
        self,
        spec: RunSpec,
        site: Site,
        store: Store,
        broker: Broker,
        results: Proxied,
        database: Database | None,
    ) -> None:
        self._schedule, self._contestant = spec.schedule, spec.contestant
        self._is_ours, self._site = spec.is_ours, site
        # Callers read results without a proxy.
        self._app: Celery = make_app({**site.settings, "result_backend": results.direct_url})
        self._broker = broker
        self._late = site.enter_context(Late(plans_of(site.settings), self._note_late))
        previous = Library(spec.previous[0], Path(spec.previous[1])) if spec.previous else None
        self._workers = Workers(site, self._schedule.shape, previous)
        self._faults = _faults(self._workers, store, broker, results, database)
        #: Each server has one fault at a time.
        self._locks = {name: threading.Lock() for name in ("store", "broker", "database", "result")}
        self._fuses = results is store
        if self._fuses:
            self._locks["result"] = self._locks["store"]
        #: Time of the call and order, by the id of the result that a caller waits for.
        self._waiting: dict[str, tuple[float, str]] = {}
        self._results: list[dict[str, Any]] = []
        self._rejected = 0
        #: The publishes that were answered by another message, which waits.
        self._collapsed: list[dict[str, Any]] = []
        self._ended = threading.Event()

    def run(self) -> dict[str, Any]:
        """Runs the schedule and returns the observations of the callers."""
        timeout = RESULT_TIMEOUT if self._is_ours else RESULT_TIMEOUT_OF_PEERS
        self._site.wait_until_ready()
        if self._fuses:
            self._workers.assert_fused_completion()
        self._started_at = time.time()
        threads = [threading.Thread(target=self._publish, daemon=True)]
        threads += [
            threading.Thread(target=self._inject, args=(fault,), daemon=True)
            for fault in self._schedule.faults
        ]
        if self._is_ours:
            threads.append(threading.Thread(target=self._plan_late_packets, daemon=True))
        # A failover may lose a forget.
        if self._is_ours and self._schedule.shape.store == "single":
            threads.append(threading.Thread(target=self._forget_orders, daemon=True))
        for thread in threads:
            thread.start()
        self._supervise_until(lambda: not any(thread.is_alive() for thread in threads), timeout)
        self._faults_ended_at = time.time()
        self._late.cancel()
        self._supervise_until(self._settled, timeout)
        self._ended.set()
        self._check_results_again()
        self._site.kill_workers()  # What they have not acknowledged returns to RabbitMQ's queues.
        return {
            "started_at": self._started_at,
            "faults_ended_at": self._faults_ended_at,
            "ended_at": time.time(),
            "restarts": self._workers.restarts,
            "rejected": self._rejected,
            "collapsed": self._collapsed,
            "messages_left": self._broker.messages(),
            "results": self._results,
            "unanswered": [
                {"task_id": task_id, "at": at, "order": order}
                for task_id, (at, order) in self._waiting.items()
            ],
        }

    def _supervise_until(self, done: Callable[[], bool], seconds: float) -> None:
        # Workers die with the thread that has started them, which is this one.
        deadline = time.monotonic() + self._schedule.calls[-1].at + seconds
        polled_at = 0.0
        while not done() and time.monotonic() < deadline:
            self._workers.supervise()
            if time.monotonic() > polled_at + RESULT_POLL_INTERVAL:
                self._poll_results()
                polled_at = time.monotonic()
            time.sleep(POLL_INTERVAL)

    def _settled(self) -> bool:
        quiet_for = time.time() - self._site.ledger.changed_at()
        empty = self._broker.messages() == 0
        if not self._waiting:
            return empty and quiet_for > SETTLED_AFTER and not self._late.holds()
        if empty and self._broker.counts_unacknowledged:
            return quiet_for > QUIET_TIMEOUT_WITHOUT_MESSAGES
        return quiet_for > (QUIET_TIMEOUT if self._is_ours else QUIET_TIMEOUT_OF_PEERS)

    # Calls

    def _publish(self) -> None:
        for call in self._schedule.calls:
            self._ended.wait(max(0.0, self._started_at + call.at - time.time()))
            contestant = self._contestant
            task = self._app.tasks[TASKS[until_of(call.order, contestant)]]
            # A call with a task id of its caller is never collapsed.
            task_id = None if getattr(task, "idempotency_dedupe_publish", None) else call.task_id
            unit = partial(unit_of, call.order, contestant=contestant)
            self._call(task, (call.order, call.seconds, call.ending), unit, task_id)

    def _call(
        self,
        task: Any,
        arguments: tuple[Any, ...],
        unit_of: Callable[[str], str],
        task_id: str | None,
    ) -> str:
        """Publishes a call, again until the broker accepts it; returns the id of its result.

        Args:
            unit_of: returns what may have one effect, by the task id.
        """
        called_at = time.time()
        while not self._ended.is_set():
            try:
                result = task.apply_async(arguments, task_id=task_id)
            except Exception as error:
                if type(error).__name__ == "AlreadyQueued":
                    self._rejected += 1
                    break
                self._ended.wait(PUBLISH_RETRY_INTERVAL)
            else:
                unit = unit_of(result.id)
                self._site.ledger.write("called", order=unit, task_id=result.id)
                if isinstance(result, RecordResult):
                    self._collapsed.append({"order": unit, "at": called_at})
                else:
                    self._waiting[result.id] = called_at, unit
                return str(result.id)
        return ""

    def _forget_orders(self) -> None:
        """Forgets a key again and again: each time, its next call runs and the others do not."""
        task, ends_at = self._app.tasks[FORGOTTEN], self._started_at + self._schedule.calls[-1].at
        for number in count():
            # What a late forget of the round before deletes is missed by the second call.
            called = {self._call_forgotten(task, number)}
            self._wait_while(self._late.holds, "forget")
            called.add(self._call_forgotten(task, number))
            self._wait_while(self._is_unacknowledged, called)
            if self._ended.is_set() or time.time() > ends_at:
                return
            while not self._ended.is_set():
                try:
                    task.idempotency_forget(FORGOTTEN, number, force=True)
                    break
                except StoreUnavailableError:
                    self._ended.wait(PUBLISH_RETRY_INTERVAL)

    def _call_forgotten(self, task: Any, number: int) -> str:
        """Returns the task id of a call that has a result."""
        unit = f"{FORGOTTEN} {number}"
        task_id = self._call(task, (FORGOTTEN, number), lambda _: unit, None)
        self._wait_while(self._waiting.__contains__, task_id)
        return task_id

    def _is_unacknowledged(self, task_ids: Collection[str]) -> bool:
        """Whether one of these messages is left; it would run after a forget."""
        number: Counter[str] = Counter()
        for line in self._site.ledger.read("published"):
            number[line["task_id"]] += 1
        for line in self._site.ledger.read("acknowledged"):
            number[line["task_id"]] -= 1
        return any(number[task_id] > 0 for task_id in task_ids)

    def _wait_while(self, condition: Callable[[Any], bool], argument: Any) -> None:
        while condition(argument) and not self._ended.wait(RESULT_POLL_INTERVAL):
            pass

    def _poll_results(self) -> None:
        for task_id in list(self._waiting):
            try:
                meta = self._app.backend.get_task_meta(task_id)
            except RedisError:  # killed
                break
            if meta["status"] in READY_STATES:
                called_at, order = self._waiting.pop(task_id)
                self._results.append(
                    {
                        "task_id": task_id,
                        "order": order,
                        "called_at": called_at,
                        "outcome": _outcome(meta),
                        "at": time.time(),
                    }
                )

    def _check_results_again(self) -> None:
        """Adds every result that has changed since it was first read."""
        for result in list(self._results):
            outcome = _outcome(self._app.backend.get_task_meta(result["task_id"]))
            if outcome != result["outcome"]:
                self._results.append(result | {"outcome": outcome})

    def _share_of_ended(self) -> float:
        return (len(self._results) + len(self._collapsed)) / len(self._schedule.calls)

    # Faults

    def _plan_late_packets(self) -> None:
        for packet in sorted(self._schedule.late, key=attrgetter("at")):
            self._ended.wait(max(0.0, self._started_at + packet.at - time.time()))
            self._late.plan(packet.name, packet.seconds, kill=packet.kills)

    def _note_late(self, packet: Packet) -> None:
        self._site.ledger.write("late", **asdict(packet))

    def _inject(self, fault: Fault) -> None:
        self._ended.wait(max(0.0, self._started_at + fault.at - time.time()))
        if fault.kind in (ROLLED_FORWARD, ROLLED_BACK):
            while self._share_of_ended() < fault.target and not self._ended.is_set():
                self._ended.wait(POLL_INTERVAL)
        inject = self._faults.get(fault.kind)
        lock = self._locks.get(fault.kind.split()[0], threading.Lock())
        pids: list[int] | None = []
        with lock:
            at = time.time()
            if inject is not None:
                try:
                    pids = inject(fault.target, fault.seconds)
                except ServerError as error:
                    _exit_servers_failed(f"{fault.kind}: {error}")
        self._site.ledger.write("fault", kind=fault.kind, at=at, until=time.time(), pids=pids or [])


def _outcome(meta: Mapping[str, Any]) -> str:
    return f"{meta['status']} {meta['result']}"


def _exit_servers_failed(reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)
    os._exit(EXIT_SERVERS_FAILED)


def _faults(
    workers: Workers,
    store: Store,
    broker: Broker,
    results: Proxied,
    database: Database | None,
) -> dict[str, Callable[[float, float], list[int] | None]]:
    """Returns the function of each kind of fault that is available."""
    faults: dict[str, Any] = {
        "child killed": workers.kill_child,
        "worker killed": workers.kill_worker,
        "parent killed": workers.kill_parent,
        "child frozen past the lease": workers.freeze_child,
        "worker frozen past the lease": workers.freeze_worker,
        "worker frozen": workers.freeze_worker,
        "worker stopped": workers.stop_worker,
        ROLLED_FORWARD: workers.roll_forward,
        ROLLED_BACK: workers.roll_back,
        "store killed": store.kill,
        "store connections cut": store.cut,
        "store frozen": store.freeze,
        "scripts flushed": store.flush_scripts,
        "broker connections cut": broker.cut,
        "broker in a black hole": broker.black_hole,
        "publish replies lost": broker.lose_confirmations,
        "store flushed": store.flush,
        "broker killed": broker.kill,
        "result backend killed": results.kill,
        "result backend frozen": results.freeze,
    }
    if database is not None:
        faults |= {
            "database killed": database.kill,
            "database connections cut": database.cut,
            "commit replies lost": database.lose_confirmations,
        }
    if isinstance(store, Single):
        faults |= {
            "store in a black hole": store.black_hole,
            "store replies delayed": store.delay_replies,
            "store replies lost": store.lose_replies,
            "store clock set back": store.set_clock_back,
            "store clock set forward": store.set_clock_forward,
        }
    return faults


if __name__ == "__main__":
    main()
