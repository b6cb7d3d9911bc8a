"""Executions that are killed or stopped, or whose broker connection is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from celery.result import AsyncResult

from labs.comparison.contestants import OURS, PLAIN
from labs.comparison.environment import Environment, PublishError
from labs.comparison.scenario import Cell, Scenario
from tests.waiting import SOON, eventually


class ChildKilled(Scenario):
    """Kills the pool process of a task of 2 s, whose message Celery then redelivers. Does the body
    finish, after how long, and with which result?

    Celery detects the death immediately or, about as often, when it next maintains its pool, which
    it does every five seconds. So the range says little about the contestants; they are compared
    by the time from the log line about the death.
    """

    name = "kill"
    title = "pool process killed (`kill -9`), task of 2 s: body finished after, result"
    expected = "SUCCESS, no later than Celery"
    exclusive = True
    options = {"concurrency": 2}

    SECONDS = 2.0
    REPEATS = 5
    #: Seconds by which equal contestants may differ.
    TOLERANCE = 0.15

    def measure(self, environment: Environment) -> Cell:
        repeats = [self._once(environment) for _ in range(self.REPEATS)]
        finished = [each for each in repeats if each["finished"]]
        results = sorted({str(each["result"]) for each in repeats})
        seconds = [each["seconds"] for each in finished or repeats]
        after_detection = [each["seconds after detection"] for each in finished or repeats]
        text = f"{min(seconds):.1f}–{max(seconds):.1f} s "
        text += f"({median(after_detection):.2f} s after detection)"
        text = f"{text}, {' / '.join(results)}" if finished else f"never: {results[0]} after {text}"
        if 0 < len(finished) < self.REPEATS:
            text = f"{len(finished)} of {self.REPEATS}: {text}"
        return Cell(text, {"repeats": repeats, "seconds after detection": after_detection})

    def is_met(self, cells: Mapping[str, Cell]) -> bool:
        ours, plain = cells[OURS.name], cells[PLAIN.name]
        if ours.failure or plain.failure:
            return False
        name = "seconds after detection"
        return (
            all(each["finished"] and each["result"] == "SUCCESS" for each in ours.facts["repeats"])
            and median(ours.facts[name]) <= median(plain.facts[name]) + self.TOLERANCE
        )

    def _once(self, environment: Environment) -> dict[str, Any]:
        order = environment.order()
        result = environment.publish("work", order, self.SECONDS)
        assert isinstance(result, AsyncResult)
        run = environment.ledger.wait_for_run(order)
        killed_at = time.monotonic()
        os.kill(run.pid, signal.SIGKILL)
        eventually(lambda: f"pid:{run.pid} exited" in environment.log(), "the death is detected")
        detected_at = time.monotonic()
        eventually(result.ready, "the task ends")
        ended_at = time.monotonic()
        environment.wait_until_settled()
        completions = environment.ledger.completions(order)
        if completions:
            assert completions[0].ended_at is not None
            ended_at = completions[0].ended_at
        error = "" if result.successful() else f" ({type(result.result).__name__})"
        return {
            "finished": len(completions),
            "result": result.state + error,
            "seconds": round(ended_at - killed_at, 2),
            "seconds after detection": round(ended_at - detected_at, 2),
        }


class WithoutRequeue(Scenario):
    """Publishes the call of a killed execution again, whose message was not requeued."""

    name = "lost"
    title = "… without requeue: next publish"
    expected = "runs"
    options = {"task_options": {"reject_on_worker_lost": False}}

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        environment.ledger.hold(order)
        first = environment.publish("work", order)
        os.kill(environment.ledger.wait_for_run(order).pid, signal.SIGKILL)
        eventually(first.ready, "the first execution fails")
        environment.wait_until_settled()
        environment.ledger.release(order)
        return Cell(*publish_again(environment, order, first))


class Stopped(Scenario):
    """Publishes a call again that was revoked while waiting, revoked while running, or stopped by
    its hard time limit.
    """

    name = "stopped"
    title = "revoked or over the hard time limit: next publish"
    expected = "runs"

    TIME_LIMIT = 1

    def measure(self, environment: Environment) -> Cell:
        stops = {
            "revoked waiting": self._revoked_waiting,
            "revoked running": self._revoked_running,
            "over the time limit": self._over_time_limit,
        }
        results = {name: self._after(environment, stop) for name, stop in stops.items()}
        texts = [text for text, _ in results.values()]
        return Cell(
            " / ".join(texts) if len(set(texts)) > 1 else texts[0],
            {name: {"result": text, **facts} for name, (text, facts) in results.items()},
        )

    @staticmethod
    def _after(
        environment: Environment, stop: Callable[[Environment, str], AsyncResult]
    ) -> tuple[str, dict[str, object]]:
        order = environment.order()
        environment.ledger.hold(order)
        first = stop(environment, order)
        eventually(first.ready, "the first execution is stopped")
        environment.wait_until_settled()
        environment.ledger.release(order)
        return publish_again(environment, order, first)

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

    def _over_time_limit(self, environment: Environment, order: str) -> AsyncResult:
        return environment.publish("work", order, time_limit=self.TIME_LIMIT)


class ConnectionDropped(Scenario):
    """Closes the worker's connections to the broker while a task of 3 s runs. How often does the
    task complete?
    """

    name = "connection"
    title = "broker connection lost during the task: completions"
    expected = "1"

    SECONDS = 3.0

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        environment.publish("work", order, self.SECONDS)
        environment.ledger.wait_for_run(order)
        dropped = environment.drop_broker_connections()
        eventually(lambda: environment.ledger.completions(order), "the task completes")
        environment.wait_until_settled()
        completions = len(environment.ledger.completions(order))
        return Cell(str(completions), {"completions": completions, "connections dropped": dropped})


class Retried(Scenario):
    """Publishes a task that retries once. What is its final state?"""

    name = "retry"
    title = "retry once"
    expected = "SUCCESS"

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        result = environment.publish("retry_once", order)
        environment.ledger.wait_for_run(order)
        eventually(
            lambda: result.ready() or environment.settled(), "the task ends, or no message is left"
        )
        state = result.state
        text = state if result.ready() else f"stuck in {state}"
        return Cell(text, {"state": state, "executions": len(environment.ledger.runs(order))})


def publish_again(
    environment: Environment, order: str, first: AsyncResult
) -> tuple[str, dict[str, object]]:
    """Publishes the call of a `first` one that failed; returns its result as text, with details."""
    ledger = environment.ledger
    before = len(ledger.runs(order))
    second = environment.publish("work", order)
    if isinstance(second, PublishError):
        return f"raises {second.name}", {"error": repr(second.error), "lock, s": environment.lock}
    if second.id == first.id:
        return "the failed task's id", {"state": second.state, "lock, s": environment.lock}
    eventually(
        lambda: second.ready() or environment.settled(), "the task ends, or no message is left"
    )
    ran = len(ledger.completions(order)) and len(ledger.runs(order)) > before
    return "runs" if ran else f"{second.state}, does not run", {"state": second.state}
