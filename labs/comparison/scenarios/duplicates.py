"""Duplicates of a running or completed task."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from celery.result import AsyncResult

from labs.comparison.environment import Environment, PublishError
from labs.comparison.scenario import Cell, Scenario
from tests.waiting import SOON

#: Seconds that an execution takes: longer than publishing its duplicates.
DURATION = 1.0


class Burst(Scenario):
    """Publishes a call 20 times while it runs. How many executions are there?"""

    name = "burst"
    title = "20 duplicates of a running task: executions"
    expected = "1"

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        environment.publish("work", order, DURATION)
        environment.ledger.wait_for_run(order)
        duplicates = [environment.publish("work", order, DURATION) for _ in range(20)]
        environment.wait_until_settled()
        executions = len(environment.ledger.completions(order))
        errors = sum(isinstance(duplicate, PublishError) for duplicate in duplicates)
        return Cell(str(executions), {"executions": executions, "publish errors": errors})


class OtherSpelling(Scenario):
    """Publishes a running call with keyword arguments, and by name. Is it executed again?"""

    name = "spelling"
    title = "the same call as kwargs / through `send_task`"
    expected = "blocked / blocked"

    def measure(self, environment: Environment) -> Cell:
        by_keywords = self._executions(
            environment,
            lambda order: environment.task("work").delay(order=order, seconds=DURATION),
        )
        by_name = self._executions(
            environment,
            lambda order: environment.app.send_task("peers.work", (order, DURATION)),
        )
        executions = {"kwargs": by_keywords, "send_task": by_name}
        texts = ("executed" if number > 1 else "blocked" for number in executions.values())
        return Cell(" / ".join(texts), executions)

    @staticmethod
    def _executions(environment: Environment, publish: Callable[[str], object]) -> int:
        order = environment.order()
        environment.publish("work", order, DURATION)
        environment.ledger.wait_for_run(order)
        with suppress(Exception):
            publish(order)
        environment.wait_until_settled()
        return len(environment.ledger.completions(order))


class WhatDuplicatesGet(Scenario):
    """Publishes a running call again. What does its caller get?"""

    name = "answer"
    title = "the caller of a duplicate gets"
    expected = "the result"

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        first = environment.publish("work", order, DURATION)
        environment.ledger.wait_for_run(order)
        second = environment.publish("work", order, DURATION)
        assert isinstance(first, AsyncResult)
        if isinstance(second, PublishError):
            return Cell(second.name, {"error": repr(second.error)})
        same = second.get(timeout=SOON) == first.get(timeout=SOON)
        if second.id == first.id:
            return Cell("the first call's AsyncResult", {"same value": same})
        return Cell("the result" if same else "another execution", {"same value": same})


class AfterCompletion(Scenario):
    """Publishes a completed call again. Is it executed again?"""

    name = "replay"
    title = "publish after completion"
    expected = "replays"

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        first = environment.publish("work", order).get(timeout=SOON)
        environment.wait_until_settled()
        second = environment.publish("work", order).get(timeout=SOON)
        executions = len(environment.ledger.runs(order))
        if executions > 1:
            return Cell("runs", {"executions": executions})
        return Cell("replays" if first == second else "another value", {"executions": executions})
