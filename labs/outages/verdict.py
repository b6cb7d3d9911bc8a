"""Evaluates one run: lost messages, duplicate executions, errors and delays."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from celery.states import SUCCESS

from labs.outages.ledger import Ledger


@dataclass(frozen=True)
class Message:
    """A message that the broker has accepted."""

    task_id: str
    order: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Counts of one run."""

    messages: int
    keys: int
    #: Executions in the ledger.
    executed: int
    #: Keys without a result for a caller whose message a worker has received.
    lost: int
    #: Messages that the broker accepted and delivered to no worker.
    undelivered: int
    #: How often the worker exited and was restarted.
    restarts: int
    #: Keys executed more than once.
    executed_twice: int
    #: … of these, with two first attempts: Redis has lost the record of one.
    forgotten: int
    #: Keys whose callers got different results.
    differing: int
    #: Callers that got an error.
    errors: int
    #: Seconds from the end of the outage to the last result; 0 if all came before.
    settled_after: float
    #: Deliveries that failed because the store was unavailable.
    rejections: int
    #: … of one message, at most.
    most_rejections: int
    #: Durations of deliveries that the breaker rejected, in microseconds.
    longest_us: int
    median_us: int
    #: Commands that timed out; retries of a command are not counted separately.
    timeouts: int
    #: Outcomes that could not be stored.
    unsaved: int


def judge(
    sent: Sequence[Message],
    results: Mapping[str, Mapping[str, Any]],
    ledger: Ledger,
    *,
    restored_at: float,
    restarts: int,
) -> Verdict:
    """Returns the verdict on a run.

    Args:
        results: task metadata of the result backend, by task id.
        restored_at: the end of the outage, in seconds since the epoch.
        restarts: of the worker.
    """
    executions = defaultdict(list)
    for execution in ledger.read("executed"):
        executions[execution["order"]].append(execution)
    received = {message["task_id"] for message in ledger.read("received")}
    by_order = defaultdict(list)
    for message in sent:
        if message.task_id in received:
            by_order[message.order].append(results.get(message.task_id))
    rejected = list(ledger.read("rejected"))
    rejections = Counter(rejection["task_id"] for rejection in rejected)
    rejected_us = sorted(r["microseconds"] for r in rejected if r["by_breaker"]) or [0]
    return Verdict(
        messages=len(sent),
        keys=len({message.order for message in sent}),
        executed=sum(map(len, executions.values())),
        lost=sum(None in each for each in by_order.values()),
        undelivered=sum(message.task_id not in received for message in sent),
        restarts=restarts,
        executed_twice=sum(len(each) > 1 for each in executions.values()),
        forgotten=sum(
            sum(execution["attempt"] == 1 and execution["protected"] for execution in each) > 1
            for each in executions.values()
        ),
        differing=sum(len(set(_values(each))) > 1 for each in by_order.values()),
        errors=sum(result["status"] != SUCCESS for result in results.values()),
        settled_after=max(0.0, max(map(_done_at, results.values()), default=0.0) - restored_at),
        rejections=len(rejected),
        most_rejections=max(rejections.values(), default=0),
        longest_us=rejected_us[-1],
        median_us=rejected_us[len(rejected_us) // 2],
        timeouts=len(list(ledger.read("timeout"))),
        unsaved=len(list(ledger.read("unsaved"))),
    )


def _values(results: Sequence[Mapping[str, Any] | None]) -> list[str]:
    return [result["result"] for result in results if result and result["status"] == SUCCESS]


def _done_at(result: Mapping[str, Any]) -> float:
    date_done = result["date_done"]
    if isinstance(date_done, str):
        date_done = datetime.fromisoformat(date_done)
    if date_done.tzinfo is None:
        date_done = date_done.replace(tzinfo=timezone.utc)
    return date_done.timestamp()
