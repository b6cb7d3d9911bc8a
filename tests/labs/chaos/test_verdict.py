"""The judge convicts: each run here is made up, with one thing wrong in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.labs.chaos import schedule
from tests.labs.chaos.downstream import Downstream, ask
from tests.labs.chaos.schedule import LEASE, STORE_KILLED
from tests.labs.chaos.verdict import (
    CUT_OFF,
    FORGOTTEN,
    FROZEN,
    KILLED,
    UNEXPLAINED,
    Disposition,
    judge,
)
from tests.labs.comparison.contestants import OURS
from tests.labs.outages.ledger import Ledger

#: Process ids.
ONE, OTHER = 1, 2
#: With one server; with a Sentinel group, and no waiting for replicas.
SINGLE, SENTINEL = 0, 7


class Run:
    """What a run leaves in its folder."""

    def __init__(self, folder: Path) -> None:
        (folder / "ledger").touch()
        self._folder = folder
        self._ledger = Ledger(folder / "ledger")
        self._downstream = Downstream(folder / "downstream.sqlite")
        self._told: list[dict[str, Any]] = []
        self._untold: list[dict[str, Any]] = []

    def execution(
        self,
        token: int,
        *,
        pid: int = ONE,
        begun: float = 0.0,
        done: float | None = None,
        completes: bool = False,
    ) -> None:
        """One of the order: it begins and, unless it is cut short, has its effect."""
        told = {"execution": f"{token}", "order": "order", "token": token}
        self._ledger.write("begun", **told, task_id="task", pid=pid, at=begun)
        if done is not None:
            self._ledger.write("done", **told, receipt=f"r{token}", accepted=True, at=done)
        if completes:
            self._ledger.write("completed", task_id="task", token=token)

    def asks(self, token: int, receipt: str | None = None) -> bool:
        """The system downstream is asked."""
        return ask(self._downstream.port, "order", f"{token}", token, receipt)

    def trigger(self, kind: str, at: float, until: float, *pids: int) -> None:
        """A fault."""
        self._ledger.write("struck", kind=kind, at=at, until=until, pids=pids)

    def message(self, what: str) -> None:
        """One of the call is published, or acknowledged."""
        self._ledger.write(what, task_id="task")

    def tell(self, outcome: str) -> None:
        """A caller gets this answer."""
        line = {"task_id": f"{len(self._told)}", "order": "order", "called_at": 0.0, "at": 1.0}
        self._told.append(line | {"told": outcome})

    def tell_nothing(self) -> None:
        """A caller gets none."""
        self._untold.append({"task_id": "task", "order": "order", "at": 0.0})

    def judged(self, seed: int = SINGLE) -> Disposition:
        """The verdict."""
        seen = {"began_at": 0.0, "ended_at": 60.0, "refused": 0, "left": 0}
        whole = seen | {"told": self._told, "untold": self._untold}
        (self._folder / "seen.json").write_text(json.dumps(whole))
        return judge(schedule.make(seed, 10), OURS.name, self._folder)

    def close(self) -> None:
        self._ledger.close()
        self._downstream.stop()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


def test_one_effect_that_everybody_is_told_of_is_faultless(run: Run) -> None:
    run.execution(1, done=1.0, completes=True)
    run.asks(1)
    run.asks(1, "r1")
    run.tell("SUCCESS r1")
    run.tell("SUCCESS r1")

    assert run.judged().faultless


class TestLost:
    def test_is_an_answer_without_an_effect(self, run: Run) -> None:
        run.execution(1)
        run.tell("FAILURE")

        assert run.judged().lost == 1

    def test_is_an_order_that_nobody_hears_of(self, run: Run) -> None:
        run.message("published")
        run.message("acknowledged")
        run.tell_nothing()

        verdict = run.judged()
        assert (verdict.lost, verdict.unanswered, verdict.lost_by_broker) == (1, 1, 0)
        assert not verdict.faultless

    def test_is_not_what_nobody_has_acknowledged_and_the_broker_has_not(self, run: Run) -> None:
        run.message("published")
        run.tell_nothing()

        verdict = run.judged()
        assert (verdict.lost, verdict.unanswered, verdict.lost_by_broker) == (0, 1, 1)

    def test_is_a_caller_without_an_answer_where_another_one_has_it(self, run: Run) -> None:
        run.execution(1, done=1.0)
        run.asks(1, "r1")
        run.tell("SUCCESS r1")
        run.tell_nothing()

        verdict = run.judged()
        assert (verdict.lost, verdict.unanswered) == (0, 1)
        assert not verdict.faultless


class TestDoubled:
    def twice(self, run: Run, *, done: float = 1.0, again: float = 20.0) -> None:
        run.execution(1, pid=ONE, begun=0.5, done=done)
        run.execution(2, pid=OTHER, begun=again, done=again + 1, completes=True)

    def test_without_a_reason(self, run: Run) -> None:
        self.twice(run)

        verdict = run.judged()
        assert verdict.doubled == {UNEXPLAINED: 1}
        assert not verdict.faultless

    def test_after_what_befell_another_process(self, run: Run) -> None:
        self.twice(run)
        run.trigger("child killed", 1.0, 1.0, OTHER)
        run.trigger("child frozen past the lease", 0.6, 0.6 + LEASE + 2, OTHER)

        assert run.judged().doubled == {UNEXPLAINED: 1}

    def test_after_a_freeze_that_a_lease_outlasts(self, run: Run) -> None:
        self.twice(run)
        run.trigger("worker frozen", 0.6, 1.0, ONE)

        assert run.judged().doubled == {UNEXPLAINED: 1}

    def test_by_one_that_was_killed_before_it_completed(self, run: Run) -> None:
        self.twice(run)
        run.trigger("worker killed", 1.1, 1.1, 99, ONE)

        assert run.judged().doubled == {KILLED: 1}

    def test_by_one_that_was_frozen(self, run: Run) -> None:
        self.twice(run, done=10.0, again=8.0)
        run.trigger("child frozen past the lease", 0.6, 9.9, ONE)

        assert run.judged().doubled == {FROZEN: 1}

    def test_by_one_that_was_frozen_before_its_body_began(self, run: Run) -> None:
        run.execution(2, pid=OTHER, begun=8.0, done=9.0, completes=True)
        run.execution(1, pid=ONE, begun=10.0, done=10.5)
        run.trigger("child frozen past the lease", 0.6, 9.9, ONE)

        assert run.judged().doubled == {FROZEN: 1}

    def test_by_one_that_died_frozen_before_anybody_took_over(self, run: Run) -> None:
        self.twice(run)
        run.trigger("worker frozen past the lease", 0.9, 0.9 + LEASE + 2, 98, ONE)
        run.trigger("parent killed", 1.5, 1.5, 98, ONE)

        assert run.judged().doubled == {KILLED: 1}

    def test_in_a_failover_that_began_long_after(self, run: Run) -> None:
        self.twice(run, done=3.0)
        run.trigger(STORE_KILLED, 2.0, 2.5)

        assert run.judged(SENTINEL).doubled == {UNEXPLAINED: 1}

    def test_in_a_failover_that_may_forget(self, run: Run) -> None:
        self.twice(run)
        run.trigger(STORE_KILLED, 1.2, 4.0)

        assert run.judged(SENTINEL).doubled == {FORGOTTEN: 1}
        assert run.judged(SINGLE).doubled == {UNEXPLAINED: 1}

    def test_by_one_that_the_store_was_away_from(self, run: Run) -> None:
        self.twice(run)
        run.trigger(STORE_KILLED, 0.7, 0.7 + LEASE)

        assert run.judged(SINGLE).doubled == {CUT_OFF: 1}


def test_two_completions_are_told(run: Run) -> None:
    for token in (1, 2):
        run.execution(token, done=1.0, completes=True)

    assert run.judged().completed_twice == 1


def test_callers_who_are_told_different_things_are_told(run: Run) -> None:
    run.execution(1, done=1.0)
    run.tell("SUCCESS r1")
    run.tell("SUCCESS r2")

    verdict = run.judged()
    assert verdict.differing == 1
    assert not verdict.faultless


class TestDownstream:
    def test_a_stale_write_is_refused(self, run: Run) -> None:
        assert run.asks(1)
        assert run.asks(2)
        assert not run.asks(1, "r1")
        assert run.asks(2, "r2")

        verdict = run.judged()
        assert (verdict.stale_refused, verdict.stale_accepted) == (1, 0)

    def test_a_stale_write_that_is_accepted_is_told(self, run: Run) -> None:
        """As from those that have no tokens."""
        for execution in ("one", "other"):
            ask(run._downstream.port, "order", execution, 0)
        assert ask(run._downstream.port, "order", "one", 0, "r1")

        verdict = run.judged()
        assert verdict.stale_accepted == 1
        assert not verdict.faultless

    def test_an_account_that_says_something_else_is_told(self, run: Run) -> None:
        run.execution(1, done=1.0)
        run.asks(1, "r1")
        run.tell("SUCCESS r2")

        verdict = run.judged()
        assert verdict.disagreeing == 1
        assert not verdict.faultless
