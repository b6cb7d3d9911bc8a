"""Each wish for a key, with real workers: what runs, waits and is returned, also under faults.

For each wish a first call runs and is held; three more calls are published; then the fault happens,
and the execution is released. After its end, one more call is published.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import exhaustive_except
from tests.waiting import SOON, eventually
from tests.worker.harness import COPIED_MESSAGES, OpenShop, Shop
from tests.worker.ledger import Run
from tests.worker.tasks import collapsed, each_message, in_turn, once, peak, reserved_turn, skipping

#: Calls while the first one is held.
DUPLICATES = 3


@dataclass(frozen=True)
class Wish:
    """A task, and what is expected of its four calls."""

    task: Any
    #: Executions, at once at most, and messages that wait while the first call runs.
    runs: int
    peak: int
    waiting: int
    #: Different outcomes that the callers get.
    outcomes: int
    #: Whether a call after the end runs.
    runs_again: bool
    #: Whether every caller gets an outcome.
    all_answered: bool = True


WISHES = {
    "charge once": Wish(once, 1, 1, 3, 1, runs_again=False),
    "one at a time": Wish(in_turn, 4, 1, 3, 4, runs_again=True),
    "one at a time, or skipped": Wish(skipping, 1, 1, 0, 1, runs_again=True, all_answered=False),
    "one at a time, published once": Wish(reserved_turn, 1, 1, 0, 1, runs_again=True),
    "collapse a burst": Wish(collapsed, 2, 1, 1, 2, runs_again=True),
    "only copies of one message": Wish(each_message, 4, 4, 0, 4, runs_again=True),
}


class Course:
    """What happened for one wish."""

    def __init__(self, shop: Shop, name: str) -> None:
        """Publishes the first call, waits until it runs, and publishes the others."""
        self.wish, self.order, self.killed = WISHES[name], name, list[Run]()
        self.results = [shop.ledger.start(self.wish.task, self.order)]
        self.results += [self.wish.task.delay(self.order) for _ in range(DUPLICATES)]
        if self.wish.peak > 1:
            shop.ledger.wait_for_run(self.order, self.wish.peak)

    def collect(self, shop: Shop) -> None:
        """Reads what has happened, after the broker has become empty; then calls once more."""
        answered = self.results if self.wish.all_answered else self.results[:1]
        self.receipts = [result.get(timeout=SOON)["receipt"] for result in answered]
        self.runs, self.notes = shop.ledger.runs(self.order), shop.ledger.notes(self.order)
        self.wish.task.delay(self.order).get(timeout=SOON)
        self.later_runs = len(shop.ledger.runs(self.order)) - len(self.runs)


def kill(shop: Shop, course: Course) -> None:
    """Kills the processes of all executions."""
    for run in shop.ledger.runs(course.order):
        shop.ledger.note(course.order, f"end {run.pid}")
        os.kill(run.pid, signal.SIGKILL)
        course.killed.append(run)


def redeliver(shop: Shop, course: Course) -> None:
    """Waits until the broker has redelivered the message of every execution."""
    for run in shop.ledger.runs(course.order):
        assert run.task_id is not None
        shop.ledger.wait_for_signal(run.task_id, "conflicted")


FAULTS = {"no fault": lambda shop, course: None, "a kill": kill, "a redelivery": redeliver}


@pytest.fixture(scope="module", params=exhaustive_except(FAULTS, "no fault"))
def courses(request: Any, open_shop: OpenShop) -> Iterator[dict[str, Course]]:
    """What happened for each wish, under one fault."""
    fault = FAULTS[request.param]
    with open_shop(idempotency_lease=4.0, **COPIED_MESSAGES) as shop:
        shop.start_worker(concurrency=12)
        courses = {name: Course(shop, name) for name in WISHES}
        # Those that run or wait; one that is put back is published before it is acknowledged.
        expected = sum(wish.peak + wish.waiting for wish in WISHES.values())
        eventually(lambda: shop.messages() == expected, f"the broker has {expected} messages")
        for course in courses.values():
            fault(shop, course)
        for course in courses.values():
            shop.ledger.release(course.order)
        shop.wait_until_empty()
        for course in courses.values():
            course.collect(shop)
        yield courses


@pytest.mark.parametrize("name", WISHES)
def test_wish(courses: dict[str, Course], name: str) -> None:
    course = courses[name]
    wish = course.wish
    ended = [run for run in course.runs if run.end == "returned"]

    assert len(ended) == wish.runs
    assert len(course.runs) == wish.runs + len(course.killed)
    assert peak(course.notes) == wish.peak
    assert len(set(course.receipts)) == wish.outcomes
    assert course.later_runs == int(wish.runs_again)
    ids = [run.task_id for run in ended]
    assert len(ids) == len(set(ids)), "no message runs twice unless it was killed"
    if wish.runs_again:
        assert {run.task_id for run in course.killed} <= set(ids)
    if wish.peak == 1:
        tokens = [run.token for run in course.runs]
        assert tokens == sorted(set(tokens))
