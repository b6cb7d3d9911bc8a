"""Runs one outage: a worker processes messages, the outage begins and ends, all results arrive."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from celery import Celery
from celery.states import READY_STATES, SUCCESS
from kombu.exceptions import OperationalError

from labs.outages.app import CHARGE, NAME
from labs.outages.faults import OutageSite
from labs.outages.outage import Outage

#: Size of the worker's pool.
PROCESSES = 2
#: About half of a worker's throughput.
MESSAGES_PER_SECOND = 100.0
#: Every n-th message duplicates an earlier one.
DUPLICATE_EVERY = 5
#: Share of the messages that are published before the outage.
SHARE_BEFORE_OUTAGE = 0.3
#: Longest wait for the last result, in seconds.
ANSWER_TIMEOUT = 60.0
POLL_INTERVAL = 0.25

#: The results of callers (task metadata of the result backend), by task id.
Results = dict[str, Mapping[str, Any]]


class Message(NamedTuple):
    """A message that the broker has accepted."""

    task_id: str
    order: str


class Verdict(NamedTuple):
    """Counts of one run."""

    keys: int
    #: Executions in the ledger.
    executed: int
    #: Keys without a result for a caller whose message a worker has received.
    lost: int
    #: Messages that the broker accepted and delivered to no worker.
    undelivered: int
    #: Keys executed more than once.
    executed_twice: int
    #: Keys whose callers got different results.
    differing: int
    #: Callers that got an error.
    errors: int
    #: Seconds from the end of the outage to the last result; 0 if all came before.
    settled_after: float
    #: Deliveries that found no store.
    postponed: int
    #: … of one message, at most.
    most_postponed: int
    #: Outcomes that could not be stored.
    unsaved: int

    def keeps_promises(self, outage: Outage) -> bool:
        """Whether nothing is lost, and nothing else happened that the outage may not cause."""
        return (
            self.lost == self.unsaved == 0
            and (outage.affects_broker or self.undelivered == 0)
            and (bool(outage.may_execute_twice) or self.executed_twice == self.differing == 0)
            and (bool(outage.may_raise) or self.errors == 0)
        )


def run(outage: Outage, messages: int, settings: Mapping[str, Any], folder: Path) -> Verdict:
    """Runs `outage` and returns the verdict.

    Args:
        settings: of the app; those of the outage take precedence.
        folder: for the ledger and the worker's log.
    """
    with OutageSite(NAME, folder / outage.name) as site, ThreadPoolExecutor(1) as scheduler:
        site.settings |= {
            **settings,
            "task_default_queue": outage.name,
            **outage.start(site),
            **outage.settings,
        }
        if outage.at_start:
            restored_at = _inject(outage, site, scheduler)
        client = _Client(site)
        if not outage.at_start:
            site.wait_until_ready()
        for number, message in enumerate(_messages(messages, outage.name)):
            if number == int(SHARE_BEFORE_OUTAGE * messages) and not outage.at_start:
                restored_at = _inject(outage, site, scheduler)
            client.publish(message)
            time.sleep(1 / MESSAGES_PER_SECOND)
        verdict = _judge(client, client.wait_for_results(), restored_at.result())
        client.app.close()
    return verdict


def _judge(client: _Client, results: Results, restored_at: float) -> Verdict:
    ledger = client.site.ledger
    executions = Counter(line["order"] for line in ledger.read("executed"))
    received = {line["task_id"] for line in ledger.read("received")}
    by_order: dict[str, list[Mapping[str, Any] | None]] = defaultdict(list)
    for message in client.sent:
        if message.task_id in received:
            by_order[message.order].append(results.get(message.task_id))
    postponed = Counter(line["task_id"] for line in ledger.read("postponed"))
    values = [
        {each["result"] for each in its_results if each and each["status"] == SUCCESS}
        for its_results in by_order.values()
    ]
    return Verdict(
        keys=len({message.order for message in client.sent}),
        executed=executions.total(),
        lost=sum(None in each for each in by_order.values()),
        undelivered=sum(message.task_id not in received for message in client.sent),
        executed_twice=sum(number > 1 for number in executions.values()),
        differing=sum(len(each) > 1 for each in values),
        errors=sum(result["status"] != SUCCESS for result in results.values()),
        settled_after=max(0.0, client.last_result_at - restored_at),
        postponed=postponed.total(),
        most_postponed=max(postponed.values(), default=0),
        unsaved=len(list(ledger.read("unsaved"))),
    )


def _inject(outage: Outage, site: OutageSite, scheduler: ThreadPoolExecutor) -> Future[float]:
    """Begins the outage and schedules its end; the result is the time of its end."""
    began = threading.Event()

    def last() -> float:
        try:
            with outage.fault(site):
                began.set()
                time.sleep(outage.seconds)
        finally:
            began.set()
        return time.time()

    ended = scheduler.submit(last)
    if outage.at_start:
        began.wait()
    return ended


def _messages(number: int, seed: str) -> Iterator[Message]:
    """Yields messages, some of which duplicate an earlier order; a function of `seed`."""
    generator = random.Random(seed)
    orders: list[str] = []
    for position in range(1, number + 1):
        task_id = str(UUID(int=generator.getrandbits(128), version=4))
        if position % DUPLICATE_EVERY:
            orders.append(f"order-{position}")
            yield Message(task_id, orders[-1])
        else:
            yield Message(task_id, generator.choice(orders))


class _Client:
    """Publishes messages, waits for their results, and supervises the worker."""

    def __init__(self, site: OutageSite) -> None:
        self.site = site
        self.sent: list[Message] = []
        #: In seconds since the epoch, by the interval at which results are read.
        self.last_result_at = 0.0
        self.app = Celery("outages", set_as_current=False)
        self.app.conf.update(site.settings)
        self._worker = site.worker("worker", "--concurrency", str(PROCESSES))

    def publish(self, message: Message) -> None:
        """Publishes a message, again until the broker accepts it."""
        while True:
            self._supervise()
            try:
                self.app.send_task(CHARGE, (message.order,), task_id=message.task_id)
            except OperationalError:
                time.sleep(POLL_INTERVAL)
            else:
                self.sent.append(message)
                return

    def wait_for_results(self) -> Results:
        """Returns the results that arrive in time."""
        results: Results = {}
        started_at = time.monotonic()
        while waiting := [m.task_id for m in self.sent if m.task_id not in results]:
            if time.monotonic() > started_at + ANSWER_TIMEOUT:
                break
            time.sleep(POLL_INTERVAL)
            self._supervise()
            for task_id in waiting:
                result = self.app.backend.get_task_meta(task_id)
                if result["status"] in READY_STATES:
                    results[task_id] = result
                    self.last_result_at = time.time()
        return results

    def _supervise(self) -> None:
        """Restarts the worker if it has exited, like a service manager."""
        if self._worker.status == "exited":
            self.site.restart(self._worker)
