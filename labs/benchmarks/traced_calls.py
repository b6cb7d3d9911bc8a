"""Calls of a task as a process of the pool makes them, in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from uuid import uuid4

from celery import Celery, Task
from celery.worker.request import Request

from labs.benchmarks.environments import Entries, server_for, start_environments
from labs.benchmarks.interleaving import Rounds, median_microseconds, round_order
from labs.benchmarks.measure import ProgressCallback
from tests.flow.deliveries import Deliveries

REPLAYED = "replayed"


class TracedCalls:
    """Messages of `task`, and their calls by Celery's tracer, which stores their results.

    Args:
        order: the argument of every call; by default, each call has an argument of its own.
    """

    def __init__(self, app: Celery, task: Task, order: str = "") -> None:
        self._deliveries = Deliveries(app, task)
        self._order = order
        self._messages: deque[Request] = deque()

    def publish(self, number: int) -> None:
        """Publishes and receives messages."""
        self._messages.extend(
            self._deliveries.publish(self._order or uuid4().hex) for _ in range(number)
        )

    def call(self) -> None:
        """Calls the task with the next message."""
        end = self._deliveries.deliver(self._messages.popleft())
        assert end.state == "success", end


@contextmanager
def start_traced_calls(entries: Entries, *, replay: str = "") -> Iterator[dict[str, TracedCalls]]:
    """Starts a server, with an app for each entry; `replay` names one whose calls are replayed."""
    with (
        server_for(entries) as server,
        start_environments(server, entries, concurrency=0) as environments,
    ):
        calls = {
            name: TracedCalls(each.app, each.task("no_op")) for name, each in environments.items()
        }
        if replay:
            replayed = environments[replay]
            calls[f"replay by {replay}"] = TracedCalls(
                replayed.app, replayed.task("no_op"), REPLAYED
            )
        yield calls


def interleave_calls(
    calls: Mapping[str, TracedCalls], rounds: int, number_per_round: int, progress: ProgressCallback
) -> Rounds:
    """Returns the median of each round in microseconds; messages are published before."""
    times: Rounds = {name: [] for name in calls}
    for number in range(-1, rounds):  # round -1 connects, and stores what is replayed
        for name in round_order(calls, max(number, 0)):
            calls[name].publish(number_per_round)
            duration = median_microseconds(calls[name].call, number_per_round)
            if number >= 0:
                times[name].append(duration)
        progress((number + 1) / rounds)
    return times
