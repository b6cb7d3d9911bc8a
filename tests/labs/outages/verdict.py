"""What an outage has done, counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from celery.states import SUCCESS

from tests.labs.outages.ledger import Ledger


@dataclass(frozen=True)
class Message:
    """One that the broker has accepted."""

    task_id: str
    order: str


@dataclass(frozen=True, kw_only=True)
class Disposition:
    """Counts of one run."""

    messages: int
    keys: int
    #: Executions, as the ledger has them.
    executed: int
    #: Keys of which a caller has no answer, though a worker has received his message.
    lost: int
    #: Messages that the broker has accepted, and no worker ever received.
    undelivered: int
    #: How often the worker ended by itself and was started again.
    restarts: int
    #: Keys executed more than once.
    doubled: int
    #: … of these, by executions that took themselves for the first: Redis had forgotten the other.
    forgotten: int
    #: Keys whose callers saw different results.
    differing: int
    #: Callers who got an error.
    told: int
    #: Seconds from the store's return to the last answer; 0 where all were there before.
    settled_after: float
    #: Passes through the gate that the store's absence ended.
    refusals: int
    #: … of one message, at most.
    most_refusals: int
    #: The longest, and the one in the middle, of those that the breaker refused, in microseconds.
    longest_us: int
    median_us: int
    #: Commands that Redis let wait until their timeout, resends counted as one.
    timeouts: int
    #: Outcomes that could not be stored.
    unsaved: int


def judge(
    sent: Sequence[Message],
    answers: Mapping[str, Mapping[str, Any]],
    ledger: Ledger,
    *,
    back_at: float,
    restarts: int,
) -> Disposition:
    """The verdict.

    Args:
        answers: what the result backend tells each caller, by task id.
        back_at: when the store was back (seconds since the epoch).
        restarts: of the worker.
    """
    runs = defaultdict(list)
    for run in ledger.read("ran"):
        runs[run["order"]].append(run)
    received = {message["task_id"] for message in ledger.read("received")}
    by_order = defaultdict(list)
    for message in sent:
        if message.task_id in received:
            by_order[message.order].append(answers.get(message.task_id))
    refused = list(ledger.read("refused"))
    passes = Counter(refusal["task_id"] for refusal in refused)
    run_sync = sorted(r["microseconds"] for r in refused if r["by_breaker"]) or [0]
    return Disposition(
        messages=len(sent),
        keys=len({message.order for message in sent}),
        executed=sum(map(len, runs.values())),
        lost=sum(None in told for told in by_order.values()),
        undelivered=sum(message.task_id not in received for message in sent),
        restarts=restarts,
        doubled=sum(len(times) > 1 for times in runs.values()),
        forgotten=sum(
            len([run for run in times if run["attempt"] == 1 and run["protected"]]) > 1
            for times in runs.values()
        ),
        differing=sum(len(set(_results(told))) > 1 for told in by_order.values()),
        told=sum(answer["status"] != SUCCESS for answer in answers.values()),
        settled_after=max(0.0, max(map(_done_at, answers.values()), default=0.0) - back_at),
        refusals=len(refused),
        most_refusals=max(passes.values(), default=0),
        longest_us=run_sync[-1],
        median_us=run_sync[len(run_sync) // 2],
        timeouts=len(list(ledger.read("timeout"))),
        unsaved=len(list(ledger.read("unsaved"))),
    )


def _results(told: Sequence[Mapping[str, Any] | None]) -> list[str]:
    return [answer["result"] for answer in told if answer and answer["status"] == SUCCESS]


def _done_at(answer: Mapping[str, Any]) -> float:
    moment = answer["date_done"]
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.timestamp()
