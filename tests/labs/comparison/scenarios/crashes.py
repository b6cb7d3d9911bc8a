"""Executions that do not come to their end, or that somebody believes to be dead."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from statistics import median

from celery.result import AsyncResult

from tests.labs.comparison.contestants import OURS, PLAIN
from tests.labs.comparison.environment import Environment, Refusal
from tests.labs.comparison.scenario import Cell, Scenario
from tests.waiting import SOON, eventually


class ChildKilled(Scenario):
    """Given a task of 2 s, kill the pool's process under it. How long from there to its end?

    Celery notices the death at once or, about as often, when it next looks after its pool, which it
    does every five seconds. So the range says little about the contestants; the time from when the
    worker's log tells of the death is what is compared.
    """

    name = "kill"
    title = "child `kill -9`, task of 2 s: finished after"
    asked = "no later than plain"
    quiet = True
    given = {"concurrency": 2}

    SECONDS = 2.0
    REPEATS = 5
    #: Seconds by which two contestants that do the same may differ.
    NOISE = 0.15

    def measure(self, environment: Environment) -> Cell:
        times = [self._once(environment) for _ in range(self.REPEATS)]
        took, once_noticed = (
            [round(seconds, 2) for seconds in each] for each in zip(*times, strict=True)
        )
        text = f"{min(took):.1f}–{max(took):.1f} s ({median(once_noticed):.2f} s once noticed)"
        return Cell(text, {"seconds": took, "seconds once noticed": once_noticed})

    def is_met(self, cells: Mapping[str, Cell]) -> bool:
        ours, plain = cells[OURS.name], cells[PLAIN.name]
        if ours.broken or plain.broken:
            return False
        later = "seconds once noticed"
        return median(ours.facts[later]) <= median(plain.facts[later]) + self.NOISE

    def _once(self, environment: Environment) -> tuple[float, float]:
        order = environment.order()
        environment.publish("work", order, self.SECONDS)
        run = environment.ledger.wait_for_run(order)
        killed_at = time.monotonic()
        os.kill(run.pid, signal.SIGKILL)
        eventually(lambda: f"pid:{run.pid} exited" in environment.log(), "the worker notices")
        noticed_at = time.monotonic()
        (again,) = eventually(lambda: environment.ledger.completions(order), "it is run again")
        environment.wait_until_settled()
        assert again.ended_at is not None
        return again.ended_at - killed_at, again.ended_at - noticed_at


class WithoutRequeue(Scenario):
    """Given a task whose process is killed and whose message is not requeued, publish again."""

    name = "lost"
    title = "… without requeue: next publish"
    asked = "runs"
    given = {"task_options": {"reject_on_worker_lost": False}}

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        environment.ledger.hold(order)
        first = environment.publish("work", order)
        os.kill(environment.ledger.wait_for_run(order).pid, signal.SIGKILL)
        eventually(first.ready, "the first one is lost")
        environment.wait_until_settled()
        environment.ledger.release(order)
        return Cell(*what_comes_of_another(environment, order, first))


class Stopped(Scenario):
    """Given a task that was revoked while it waited, revoked while it ran, or stopped by its hard
    time limit, publish again.
    """

    name = "stopped"
    title = "revoked or hard-limited, publish again"
    asked = "runs"

    TIME_LIMIT = 1

    def measure(self, environment: Environment) -> Cell:
        stops = {
            "revoked waiting": self._revoked_waiting,
            "revoked running": self._revoked_running,
            "hard-limited": self._limited,
        }
        outcomes = {name: self._after(environment, stop) for name, stop in stops.items()}
        words = {name: word for name, (word, _) in outcomes.items()}
        # Three times the same is said once.
        text = " / ".join(words.values() if len(set(words.values())) > 1 else set(words.values()))
        return Cell(
            text, {name: {"gets": word, **facts} for name, (word, facts) in outcomes.items()}
        )

    @staticmethod
    def _after(
        environment: Environment, stop: Callable[[Environment, str], AsyncResult]
    ) -> tuple[str, dict[str, object]]:
        order = environment.order()
        environment.ledger.hold(order)
        first = stop(environment, order)
        eventually(first.ready, "the first one is stopped")
        environment.wait_until_settled()
        environment.ledger.release(order)
        return what_comes_of_another(environment, order, first)

    @staticmethod
    def _revoked_waiting(environment: Environment, order: str) -> AsyncResult:
        task_id = environment.order()
        environment.app.control.revoke(task_id, reply=True, timeout=SOON, limit=1)
        return environment.publish("work", order, task_id=task_id)

    @staticmethod
    def _revoked_running(environment: Environment, order: str) -> AsyncResult:
        result = environment.publish("work", order)
        environment.ledger.wait_for_run(order)
        result.revoke(terminate=True)
        return result

    def _limited(self, environment: Environment, order: str) -> AsyncResult:
        return environment.publish("work", order, time_limit=self.TIME_LIMIT)


class ConnectionDropped(Scenario):
    """Given a task of 3 s that runs, close the worker's connections to the broker. Count
    completions.
    """

    name = "connection"
    title = "broker connection dropped while running: completions"
    asked = "1"

    SECONDS = 3.0

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        environment.publish("work", order, self.SECONDS)
        environment.ledger.wait_for_run(order)
        dropped = environment.drop_broker_connections()
        eventually(lambda: environment.ledger.completions(order), "it completes")
        environment.wait_until_settled()
        completions = len(environment.ledger.completions(order))
        return Cell(str(completions), {"completions": completions, "connections dropped": dropped})


class Retried(Scenario):
    """Given a task that asks for one retry, publish it. What state does it come to?"""

    name = "retry"
    title = "retry once"
    asked = "SUCCESS"

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        result = environment.publish("retry_once", order)
        environment.ledger.wait_for_run(order)
        eventually(
            lambda: result.ready() or environment.settled(), "it ends, or nothing is left to do"
        )
        state = result.state
        text = state if result.ready() else f"stuck in {state}"
        return Cell(text, {"state": state, "executions": len(environment.ledger.runs(order))})


def what_comes_of_another(
    environment: Environment, order: str, first: AsyncResult
) -> tuple[str, dict[str, object]]:
    """Publish the same call again, after the `first` one came to nothing: in words, and facts."""
    before = len(environment.ledger.runs(order))
    again = environment.publish("work", order)
    if isinstance(again, Refusal):
        return f"refused ({again.name})", {"error": repr(again.error), "lock, s": environment.lock}
    if again.id == first.id:
        return "the dead id", {"state": again.state, "lock, s": environment.lock}
    eventually(lambda: again.ready() or environment.settled(), "it ends, or nothing is left to do")
    ran = (
        len(environment.ledger.completions(order)) and len(environment.ledger.runs(order)) > before
    )
    return "runs" if ran else f"{again.state}, does not run", {"state": again.state}
