"""The scenarios, in the order of the table: each publishes to one contestant."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any, NamedTuple

from celery import chain, chord
from celery.result import AsyncResult

from labs.comparison.contestants import OURS, PLAIN
from labs.comparison.environment import Environment, PublishError
from tests.waiting import SOON, eventually
from tests.worker.ledger import Run

#: Seconds that an execution takes: longer than publishing its duplicates.
DURATION = 1.0
#: How often a pool process is killed, and seconds by which equal contestants may differ.
KILLS, TOLERANCE = 5, 0.15


class Cell(NamedTuple):
    """The result of one contestant in one scenario."""

    text: str
    #: Of the timed scenario: compared with plain Celery's.
    seconds: float = 0.0
    #: The traceback and the worker's output, if the scenario itself raised an error.
    failure: str = ""


@dataclass(frozen=True)
class Scenario:
    """A row of the table."""

    name: str
    title: str
    #: The text that celery-idempotent must have.
    expected: str
    measure: Callable[[Environment], Cell]
    #: Arguments of every contestant's `Environment`.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Whether it runs alone, and celery-idempotent must take no longer than plain Celery.
    is_timed: bool = False

    def is_met(self, cells: Mapping[str, Cell]) -> bool:
        """Whether celery-idempotent has the expected result; `cells` are by contestant."""
        ours, plain = cells[OURS.name], cells[PLAIN.name]
        if self.is_timed:
            return ours.seconds <= plain.seconds + TOLERANCE and not plain.failure
        return ours.text == self.expected


def burst(environment: Environment) -> Cell:
    """Publishes a call 20 times while it runs. How many executions are there?"""
    order = environment.start(DURATION)
    for _ in range(20):
        environment.publish("work", order, DURATION)
    return Cell(f"{len(_settled_completions(environment, order))}")


def other_spelling(environment: Environment) -> Cell:
    """Publishes a running call with keyword arguments, and by name. Is it executed again?"""
    work, texts = environment.task("work"), []
    for publish in (
        lambda order: work.delay(order=order, seconds=DURATION),
        lambda order: environment.app.send_task("peers.work", (order, DURATION)),
    ):
        order = environment.start(DURATION)
        with suppress(Exception):
            publish(order)
        executions = len(_settled_completions(environment, order))
        texts.append("executed" if executions > 1 else "blocked")
    return Cell(" / ".join(texts))


def what_duplicates_get(environment: Environment) -> Cell:
    """Publishes a running call again. What does its caller get?"""
    order = environment.order()
    first = environment.publish("work", order, DURATION)
    environment.ledger.wait_for_run(order)
    second = environment.publish("work", order, DURATION)
    assert isinstance(first, AsyncResult)
    if isinstance(second, PublishError):
        return Cell(second.name)
    same = second.get(timeout=SOON) == first.get(timeout=SOON)
    if second.id == first.id:
        return Cell("the first call's AsyncResult")
    return Cell("the result" if same else "another execution")


def after_completion(environment: Environment) -> Cell:
    """Publishes a completed call again. Is it executed again?"""
    order = environment.order()
    first = environment.publish("work", order).get(timeout=SOON)
    environment.wait_until_settled()
    second = environment.publish("work", order).get(timeout=SOON)
    if len(environment.ledger.runs(order)) > 1:
        return Cell("runs")
    return Cell("replays" if first == second else "another value")


def child_killed(environment: Environment) -> Cell:
    """Kills the pool process of a task of 2 s, whose message Celery then redelivers. Does the body
    finish, after how long, and with which result?

    Celery detects the death immediately or, about as often, when it next maintains its pool, which
    it does every five seconds. So the range says little about the contestants; they are compared
    by the time from the log line about the death.
    """
    results, took, after_detection = set(), [], []
    finished = 0
    for _ in range(KILLS):
        order = environment.order()
        result = environment.publish("work", order, 2.0)
        assert isinstance(result, AsyncResult)
        run = environment.ledger.wait_for_run(order)
        killed_at = time.time()
        os.kill(run.pid, signal.SIGKILL)
        exited = f"pid:{run.pid} exited"
        eventually(lambda exited=exited: exited in environment.log(), "the death is detected")
        detected_at = time.time()
        eventually(result.ready, "the task ends")
        ended_at = time.time()
        for each in _settled_completions(environment, order)[:1]:
            finished += 1
            ended_at = each.ended_at or ended_at
        error = "" if result.successful() else f" ({type(result.result).__name__})"
        results.add(result.state + error)
        took.append(ended_at - killed_at)
        after_detection.append(ended_at - detected_at)
    seconds = median(after_detection)
    text = f"{min(took):.1f}–{max(took):.1f} s ({seconds:.2f} s after detection)"
    result_text = " / ".join(sorted(results))
    if not finished:
        return Cell(f"never: {result_text} after {text}", inf)
    number = "" if finished == KILLS else f"{finished} of {KILLS}: "
    is_expected = finished == KILLS and results == {"SUCCESS"}
    return Cell(f"{number}{text}, {result_text}", seconds if is_expected else inf)


def without_requeue(environment: Environment) -> Cell:
    """Publishes the call of a killed execution again, whose message was not requeued."""
    order = environment.order()
    environment.ledger.hold(order)
    first = environment.publish("work", order)
    os.kill(environment.ledger.wait_for_run(order).pid, signal.SIGKILL)
    return Cell(_next_publish(environment, order, first))


def stopped(environment: Environment) -> Cell:
    """Publishes a call again that was revoked while waiting, revoked while running, or stopped by
    its hard time limit.
    """

    def revoked_waiting(order: str) -> AsyncResult:
        task_id = environment.order()
        environment.app.control.revoke(task_id, reply=True, timeout=SOON, limit=1)
        return environment.publish("work", order, task_id=task_id)

    def revoked_running(order: str) -> AsyncResult:
        result = environment.publish("work", order)
        environment.ledger.wait_for_run(order)
        result.revoke(terminate=True)
        return result

    def over_time_limit(order: str) -> AsyncResult:
        return environment.publish("work", order, time_limit=1)

    texts = []
    for stop in (revoked_waiting, revoked_running, over_time_limit):
        order = environment.order()
        environment.ledger.hold(order)
        texts.append(_next_publish(environment, order, stop(order)))
    return Cell(" / ".join(texts) if len(set(texts)) > 1 else texts[0])


def longer_than_the_lock(environment: Environment) -> Cell:
    """Publishes a call of 6 s, with a lock of 2 s, six times at intervals of 1.6 s.

    How many executions are there, and how many of them at the same time?
    """
    order, first_at = environment.order(), time.monotonic()
    for number in range(6):
        time.sleep(max(0.0, first_at + number * 1.6 - time.monotonic()))
        environment.publish("work", order, 6.0)
    return _executions(environment, order)


def longer_than_the_visibility_timeout(environment: Environment) -> Cell:
    """Publishes one task of 12 s to a broker that redelivers unacknowledged messages after 3 s.

    How many executions are there, and how many of them at the same time?
    """
    return _executions(environment, environment.start(12.0))


def connection_dropped(environment: Environment) -> Cell:
    """Closes the worker's connections to the broker while a task of 3 s runs. How often does the
    task complete?
    """
    order = environment.start(3.0)
    environment.drop_broker_connections()
    eventually(lambda: _completions(environment, order), "the task completes")
    return Cell(f"{len(_settled_completions(environment, order))}")


def retried(environment: Environment) -> Cell:
    """Publishes a task that retries once. What is its final state?"""
    order = environment.order()
    result = environment.publish("retry_once", order)
    environment.ledger.wait_for_run(order)
    _wait_for_end(environment, result)
    return Cell(result.state if result.ready() else f"stuck in {result.state}")


def chord_with_duplicate(environment: Environment) -> Cell:
    """Publishes a chord whose header has the same call twice. Does its body run?"""
    order, after = environment.order(), environment.order()
    same = environment.task("work").s(order, 1.0)
    state = result = None
    try:
        body = environment.task("follow").s(after)
        result = chord([same, same.clone()], app=environment.app)(body)
    except Exception as raised:
        state = type(raised).__name__
    environment.ledger.wait_for_run(order)
    _wait_for_end(environment, result)
    bodies = len(_settled_completions(environment, after))
    if bodies == 0:
        return Cell(f"{state or (result and result.state)}, no body")
    return Cell("body once" if bodies == 1 else f"body {bodies} times")


def second_chain(environment: Environment) -> Cell:
    """Publishes a chain, and another one with the same head while that runs. Do both tails run?"""
    head, tails = environment.order(), [environment.order(), environment.order()]
    work, follow = environment.task("work"), environment.task("follow")
    error = None
    chain(work.s(head, 2.0), follow.s(tails[0]), app=environment.app).apply_async()
    environment.ledger.wait_for_run(head)
    try:
        chain(work.s(head, 2.0), follow.s(tails[1]), app=environment.app).apply_async()
    except Exception as raised:
        error = type(raised).__name__
    ended = [_settled_completions(environment, tail) for tail in tails]
    return Cell("both chains end" if all(ended) else error or "the second chain is lost")


def _completions(environment: Environment, order: str) -> list[Run]:
    """Returns the executions of `order` that have ended."""
    return [run for run in environment.ledger.runs(order) if run.end == "returned"]


def _settled_completions(environment: Environment, order: str) -> list[Run]:
    environment.wait_until_settled()
    return _completions(environment, order)


def _executions(environment: Environment, order: str) -> Cell:
    """Returns how many executions there were, and how many of them at the same time."""
    environment.ledger.wait_for_run(order)
    runs = _settled_completions(environment, order)
    changes = [(run.started_at, 1) for run in runs] + [(run.ended_at or 0.0, -1) for run in runs]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return Cell(f"{len(runs)} / {most}")


def _next_publish(environment: Environment, order: str, first: AsyncResult) -> str:
    """Publishes a call again when the `first` one has failed; returns what happens to it."""
    ledger = environment.ledger
    eventually(first.ready, "the first execution fails")
    environment.wait_until_settled()
    ledger.release(order)
    before = len(ledger.runs(order))
    second = environment.publish("work", order)
    if isinstance(second, PublishError):
        return f"raises {second.name}"
    if second.id == first.id:
        return "the failed task's id"
    _wait_for_end(environment, second)
    ran = _completions(environment, order) and len(ledger.runs(order)) > before
    return "runs" if ran else f"{second.state}, does not run"


def _wait_for_end(environment: Environment, result: AsyncResult | None) -> None:
    eventually(
        lambda: (result is not None and result.ready()) or environment.settled(),
        "the task ends, or no message is left",
    )


_REDELIVERY = {
    "visibility_timeout": 3,
    # kombu checks for these every second, instead of every hundred seconds.
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}
_WITHOUT_REQUEUE = {"task_options": {"reject_on_worker_lost": False}}
_KILLED = "pool process killed (`kill -9`), task of 2 s: body finished after, result"
_VISIBLE = "12 s task, visibility timeout 3 s, one publish: executions / concurrent"
_LOCKED = "6 s task, lock of 2 s, 6 publishes: executions / concurrent"
SCENARIOS = (
    Scenario("burst", "20 duplicates of a running task: executions", "1", burst),
    Scenario(
        *("spelling", "the same call as kwargs / through `send_task`"),
        *("blocked / blocked", other_spelling),
    ),
    Scenario("answer", "the caller of a duplicate gets", "the result", what_duplicates_get),
    Scenario("replay", "publish after completion", "replays", after_completion),
    Scenario(
        *("kill", _KILLED, "SUCCESS, no later than Celery", child_killed),
        options={"concurrency": 2},
        is_timed=True,
    ),
    Scenario("lost", "… without requeue: next publish", "runs", without_requeue, _WITHOUT_REQUEUE),
    Scenario("lock", _LOCKED, "1 / 1", longer_than_the_lock, {"concurrency": 6, "lock": 2.0}),
    Scenario(
        *("visibility", _VISIBLE, "1 / 1", longer_than_the_visibility_timeout),
        {"settings": {"broker_transport_options": _REDELIVERY}},
    ),
    Scenario(
        "connection", "broker connection lost during the task: completions", "1", connection_dropped
    ),
    Scenario("retry", "retry once", "SUCCESS", retried),
    Scenario("stopped", "revoked or over the hard time limit: next publish", "runs", stopped),
    Scenario("chord", "chord with a duplicate in its header", "body once", chord_with_duplicate),
    Scenario("chain", "second chain with the same head", "both chains end", second_chain),
)


def find_scenario(name: str) -> Scenario:
    """Returns the scenario of that name."""
    return next(scenario for scenario in SCENARIOS if scenario.name == name)
