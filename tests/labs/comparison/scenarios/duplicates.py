"""Duplicates of a task that runs, or has run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from celery.result import AsyncResult

from tests.labs.comparison.environment import Environment, Refusal
from tests.labs.comparison.scenario import Cell, Scenario
from tests.waiting import SOON

#: Seconds that the first one takes: longer than it takes to publish its duplicates.
A_WHILE = 1.0


class Burst(Scenario):
    """Given a task that runs, publish the same call 20 times. Count executions."""

    name = "burst"
    title = "1 running + 20 duplicates: executions"
    asked = "1"

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        environment.publish("work", order, A_WHILE)
        environment.ledger.wait_for_run(order)
        duplicates = [environment.publish("work", order, A_WHILE) for _ in range(20)]
        environment.wait_until_settled()
        executions = len(environment.ledger.completions(order))
        refused = sum(isinstance(duplicate, Refusal) for duplicate in duplicates)
        return Cell(str(executions), {"executions": executions, "refused": refused})


class OtherSpelling(Scenario):
    """Given a task that runs, publish the same call spelt otherwise. Is it executed too?"""

    name = "spelling"
    title = "the same call as kwargs / through `send_task`"
    asked = "blocked / blocked"

    def measure(self, environment: Environment) -> Cell:
        by_keywords = self._executions(
            environment,
            lambda order: environment.task("work").delay(order=order, seconds=A_WHILE),
        )
        by_name = self._executions(
            environment,
            lambda order: environment.app.send_task("peers.work", (order, A_WHILE)),
        )
        found = {"kwargs": by_keywords, "send_task": by_name}
        words = ("extra" if executions > 1 else "blocked" for executions in found.values())
        return Cell(" / ".join(words), found)

    @staticmethod
    def _executions(environment: Environment, publish: Callable[[str], object]) -> int:
        order = environment.order()
        environment.publish("work", order, A_WHILE)
        environment.ledger.wait_for_run(order)
        with suppress(Exception):
            publish(order)
        environment.wait_until_settled()
        return len(environment.ledger.completions(order))


class WhatDuplicatesGet(Scenario):
    """Given a task that runs, publish the same call. What does its caller get?"""

    name = "answer"
    title = "a duplicate gets"
    asked = "the result"

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        first = environment.publish("work", order, A_WHILE)
        environment.ledger.wait_for_run(order)
        second = environment.publish("work", order, A_WHILE)
        assert isinstance(first, AsyncResult)
        if isinstance(second, Refusal):
            return Cell(second.name, {"error": repr(second.error)})
        same = second.get(timeout=SOON) == first.get(timeout=SOON)
        if second.id == first.id:
            return Cell("the holder's AsyncResult", {"same value": same})
        return Cell("the result" if same else "another run", {"same value": same})


class AfterCompletion(Scenario):
    """Given a task that has returned, publish the same call. Is it executed again?"""

    name = "replay"
    title = "publish after completion"
    asked = "replays"

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        first = environment.publish("work", order).get(timeout=SOON)
        environment.wait_until_settled()
        second = environment.publish("work", order).get(timeout=SOON)
        executions = len(environment.ledger.runs(order))
        if executions > 1:
            return Cell("runs", {"executions": executions})
        return Cell("replays" if first == second else "another value", {"executions": executions})
