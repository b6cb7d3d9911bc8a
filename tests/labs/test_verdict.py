"""Tests of verdicts on constructed evidence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from labs.chaos import downstream, schedule
from labs.chaos.schedule import LEASE, ROLLED_BACK, STORE_KILLED
from labs.chaos.verdict import DISCONNECTED, FORGOTTEN, FROZEN, KILLED, UNEXPLAINED, Verdict, judge
from labs.comparison.contestants import OURS
from labs.rig.ledger import Ledger
from tests.servers.redis_server import RedisServer

#: Process ids.
ONE, OTHER = 1, 2
#: Seeds with a single server, and with Sentinel and without `wait_replicas`.
SINGLE, SENTINEL = 0, 7


class Run:
    """Writes the evidence of a run."""

    def __init__(self, folder: Path) -> None:
        (folder / "ledger").touch()
        self._folder = folder
        self._ledger = Ledger(folder / "ledger")
        self._server = RedisServer.start()
        self._results: list[dict[str, Any]] = []
        self._unanswered: list[dict[str, Any]] = []
        self._rows: list[dict[str, str]] = []

    def execution(
        self, token: int, done: float = 0, completes: bool = False, order: str = "order", **how: Any
    ) -> None:
        """Records an execution of the order; without `done`, it has no effect."""
        details = {"execution": f"{token}", "order": order, "token": token}
        process = {"pid": ONE, "started_at": 0.0, "this_version": True, **how}
        self._ledger.write("started", **details, task_id="task", **process)
        if done:
            self._ledger.write("effect", **details, receipt=f"r{token}", accepted=True, at=done)
        if completes:
            self._ledger.write("completed", task_id="task", token=token)

    def request(self, token: int, receipt: str = "", execution: str = "") -> bool:
        """Sends a request to the downstream system."""
        return downstream.send(self._server.url, "order", execution or f"{token}", token, receipt)

    def row(self, token: int, order: str = "order") -> None:
        """Records that the effect of an execution is committed."""
        self._rows.append({"name": order, "execution": f"{token}", "receipt": f"r{token}"})

    def fault(self, kind: str, at: float, until: float, *pids: int) -> None:
        """Records a fault."""
        self._ledger.write("fault", kind=kind, at=at, until=until, pids=pids)

    def message(self, event: str) -> None:
        """Records that the message is published or acknowledged."""
        self._ledger.write(event, task_id="task")

    def result(self, outcome: str, order: str = "order") -> None:
        """Records the result of a caller."""
        line = {"task_id": f"{len(self._results)}", "order": order, "called_at": 0.0, "at": 1.0}
        self._results.append(line | {"outcome": outcome})

    def no_result(self) -> None:
        """Records a caller without a result."""
        self._unanswered.append({"task_id": "task", "order": "order", "at": 0.0})

    def judge(self, seed: int = SINGLE, *, transaction: bool = False) -> Verdict:
        """Returns the verdict."""
        requests = downstream.requests(self._server.url)
        observations = {"started_at": 0.0, "ended_at": 60.0, "rejected": 0, "messages_left": 0}
        observations |= {"results": self._results, "unanswered": self._unanswered}
        observations |= {"effects": self._rows, "requests": requests}
        (self._folder / "observations.json").write_text(json.dumps(observations))
        made = schedule.make(seed, 100, transaction=transaction)
        return judge(made, OURS.name, self._folder)

    def close(self) -> None:
        self._ledger.close()
        self._server.stop()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


def keeps(run: Run) -> None:
    run.execution(1, done=1.0, completes=True)
    run.request(1)
    run.request(1, "r1")
    run.result("SUCCESS r1")
    run.result("SUCCESS r1")


def has_no_effect(run: Run) -> None:
    run.execution(1)
    run.result("FAILURE")


def has_no_result(run: Run) -> None:
    run.message("published")
    run.message("acknowledged")
    run.no_result()


def completes_twice(run: Run) -> None:
    for token in (1, 2):
        run.execution(token, done=1.0, completes=True)


def has_two_results(run: Run) -> None:
    run.execution(1, done=1.0)
    run.result("SUCCESS r1")
    run.result("SUCCESS r2")


def is_fenced(run: Run) -> None:
    assert run.request(1)
    assert run.request(2)
    assert not run.request(1, "r1")
    assert run.request(2, "r2")


def writes_when_stale(run: Run) -> None:
    """Contestants without tokens always send 0."""
    for execution in ("first", "second"):
        run.request(0, execution=execution)
    assert run.request(0, "r1", execution="first")


def has_another_receipt(run: Run) -> None:
    run.execution(1, done=1.0)
    run.request(1, "r1")
    run.result("SUCCESS r2")


def reaches_both_versions(run: Run) -> None:
    keeps(run)
    run.execution(2, this_version=False)
    for number, this_version in enumerate((False, True)):
        run._ledger.write("delivered", delivery="", task_id=f"{number}", this_version=this_version)
    run.fault(ROLLED_BACK, 2.0, 3.0)


#: What happens, the counts of the verdict, and whether the promises are kept.
COURSES: dict[Callable[[Run], None], tuple[dict[str, int], bool]] = {
    keeps: ({"lost": 0, "differing": 0}, True),
    has_no_effect: ({"lost": 1}, False),
    has_no_result: ({"lost": 1, "unanswered": 1, "lost_by_broker": 0}, False),
    completes_twice: ({"completed_twice": 1}, False),
    has_two_results: ({"differing": 1}, False),
    is_fenced: ({"stale_rejected": 1, "stale_accepted": 0}, True),
    writes_when_stale: ({"stale_accepted": 1}, False),
    has_another_receipt: ({"disagreeing": 1}, False),
    reaches_both_versions: ({"executions_of_previous": 1, "orders_of_both": 1}, True),
}


@pytest.mark.parametrize("course", COURSES, ids=lambda course: course.__name__)
def test_an_order_that(run: Run, course: Callable[[Run], None]) -> None:
    counts, kept = COURSES[course]
    course(run)

    verdict = run.judge()
    assert {name: getattr(verdict, name) for name in counts} == counts
    assert verdict.keeps_promises is kept, verdict


PAST_LEASE = "child frozen past the lease"
OF_OTHER = [("child killed", 1.0, 1.0, OTHER), (PAST_LEASE, 0.6, 0.6 + LEASE + 2, OTHER)]
#: Two effects: their times, the faults, the seed, and what explains the second one.
DUPLICATES: dict[str, tuple[dict[str, float], list[tuple[Any, ...]], int, str]] = {
    "no fault": ({}, [], SINGLE, UNEXPLAINED),
    "faults of another process": ({}, OF_OTHER, SINGLE, UNEXPLAINED),
    "frozen, but not past the lease": ({}, [("worker frozen", 0.6, 1.0, ONE)], SINGLE, UNEXPLAINED),
    "killed before completion": ({}, [("worker killed", 1.1, 1.1, 99, ONE)], SINGLE, KILLED),
    "frozen": ({"done": 10.0, "again": 8.0}, [(PAST_LEASE, 0.6, 9.9, ONE)], SINGLE, FROZEN),
    "a later failover": ({"done": 3.0}, [(STORE_KILLED, 2.0, 2.5)], SENTINEL, UNEXPLAINED),
    "a failover without wait_replicas": ({}, [(STORE_KILLED, 1.2, 4.0)], SENTINEL, FORGOTTEN),
    "a restart": ({}, [(STORE_KILLED, 1.2, 4.0)], SINGLE, UNEXPLAINED),
    "an unavailable store": ({}, [(STORE_KILLED, 0.7, 0.7 + LEASE)], SINGLE, DISCONNECTED),
}


@pytest.mark.parametrize("fault", DUPLICATES)
def test_a_duplicate_effect_has_a_reason(run: Run, fault: str) -> None:
    times, faults, seed, reason = DUPLICATES[fault]
    done, again = times.get("done", 1.0), times.get("again", 20.0)
    run.execution(1, pid=ONE, started_at=0.5, done=done)
    run.execution(2, pid=OTHER, started_at=again, done=again + 1, completes=True)
    for each in faults:
        run.fault(*each)

    verdict = run.judge(seed)
    assert verdict.duplicates == {reason: 1}
    assert reason != UNEXPLAINED or not verdict.keeps_promises


@pytest.mark.parametrize(
    ("decisions", "ends", "miscounted"), [(1, True, 0), (0, False, 0), (0, True, 1), (2, True, 1)]
)
def test_a_delivery_has_one_decision(run: Run, decisions: int, ends: bool, miscounted: int) -> None:
    for _ in range(decisions):
        run._ledger.write("decided", delivery="first", decision="run")
    if ends:
        run._ledger.write("ended", delivery="first")

    verdict = run.judge()
    assert verdict.miscounted == miscounted
    assert verdict.keeps_promises is not bool(miscounted)


class TestTransaction:
    """Effects that are rows in a database."""

    #: An order of the schedule that ends in an error.
    DECLINED = next(c.order for c in schedule.make(SINGLE, 100).calls if c.ending == "declined")

    def test_an_effect_that_is_rolled_back_is_not_duplicated(self, run: Run) -> None:
        run.execution(1, done=1.0)
        run.execution(2, started_at=2.0, done=3.0, completes=True)
        run.row(2)
        run.result("SUCCESS r2")

        verdict = run.judge(transaction=True)
        assert verdict.keeps_promises, verdict
        assert (verdict.executions, verdict.orders_with_duplicates) == (2, 0)

    def test_no_reason_explains_a_duplicate_effect(self, run: Run) -> None:
        run.execution(1, done=1.0)
        run.execution(2, pid=OTHER, started_at=20.0, done=21.0, completes=True)
        run.fault("worker killed", 1.1, 1.1, 99, ONE)
        run.row(1)
        run.row(2)
        run.result("SUCCESS r2")

        verdict = run.judge(transaction=True)
        assert verdict.duplicates == {KILLED: 1}
        assert not verdict.keeps_promises

    @pytest.mark.parametrize("has_row", [False, True])
    def test_a_declined_order_has_no_effect(self, run: Run, has_row: bool) -> None:
        run.execution(1, done=1.0, order=self.DECLINED)
        run.result("FAILURE r1", self.DECLINED)
        if has_row:
            run.row(1, self.DECLINED)

        assert run.judge(transaction=True).keeps_promises is not has_row
