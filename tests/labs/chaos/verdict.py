"""What a contestant made of a schedule, counted; and for every effect that was doubled, why.

Judged by what the task bodies wrote down, by the system downstream, and by what callers were told:
never by anything that a contestant says of itself. Completions are the one exception, because a
completion is nothing else than the contestant's word.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.labs.chaos import downstream
from tests.labs.chaos.downstream import Entry
from tests.labs.chaos.schedule import LEASE, STORE_KILLED, Schedule
from tests.labs.outages.ledger import Ledger

#: Why an effect was doubled that nobody can avoid.
KILLED = "killed after its effect, before its completion"
FROZEN = "frozen past the lease"
CUT_OFF = "cut off from the store past the lease"
UNSAVED = "store away for a lease after its effect, which the log told"
FORGOTTEN = "forgotten in a failover"
#: … and where none of these is found.
UNEXPLAINED = "unexplained"

KILLS = ("child killed", "worker killed", "parent killed", "worker told to stop")
#: Part of a lease that is left, at the least, when the store goes: it is extended every third.
LEFT = 2 / 3
#: Seconds in which an execution that was killed had not yet told that it was complete; and in which
#: one that thaws comes from its begin to its body.
SETTLING = 2.0
#: Seconds by which a replica may be behind its master, on a busy machine.
LAG = 1.0


@dataclass(frozen=True)
class Execution:
    """One execution of a task's body."""

    execution: str
    order: str
    task_id: str
    pid: int
    token: int
    begun_at: float
    #: None if it was killed, or asked to be tried again.
    done_at: float | None
    receipt: str | None


@dataclass(frozen=True)
class Strike:
    """A fault as it was struck. Times are in seconds since the epoch."""

    kind: str
    at: float
    until: float
    pids: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Disposition:
    """Counts of one run."""

    seed: int
    contestant: str
    shape: str
    calls: int
    orders: int
    executions: int
    faults: int
    #: Orders that were accepted and never had an effect, or whose callers were all left without
    #: an answer.
    lost: int
    #: Callers without an answer.
    unanswered: int
    #: … whose message was published more often than it was acknowledged, and is nowhere: the
    #: broker's transport has lost it. Not among the `lost`.
    lost_by_broker: int
    #: Calls that were refused.
    refused: int
    #: Orders with the effects of two executions that ran to the end of the body, and why.
    doubled: Mapping[str, int] = field(default_factory=dict)
    #: Orders that two executions were told to have completed.
    completed_twice: int
    #: Writes that the system downstream refused.
    stale_refused: int
    #: Writes that it accepted from an execution after a later one had begun.
    stale_accepted: int
    #: Orders whose callers saw different outcomes.
    differing: int
    #: Orders of which the system downstream says something else than their callers were told.
    disagreeing: int
    #: Seconds from each fault's end to the next effect.
    recovery: Sequence[float] = ()
    #: Seconds from a call to its caller's answer: the one in the middle, and the longest.
    median_delay: float
    longest_delay: float
    seconds: float
    #: Orders that were doubled or lost, each with what is known of it.
    notes: Sequence[str] = ()

    def write(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @property
    def doubled_orders(self) -> int:
        """Whatever the reason."""
        return sum(self.doubled.values())

    @property
    def faultless(self) -> bool:
        """Whether all is as celery-idempotent promises."""
        return not (
            self.lost
            or self.differing
            or self.stale_accepted
            or self.disagreeing
            or self.completed_twice
            or self.unanswered > self.lost_by_broker
            or self.doubled.get(UNEXPLAINED)
        )


@dataclass(frozen=True)
class Evidence:
    """All that a run has left."""

    seen: Mapping[str, Any]
    executions: Sequence[Execution]
    strikes: Sequence[Strike]
    #: By task id.
    published: Mapping[str, int]
    acknowledged: Mapping[str, int]
    #: Tokens whose completion was accepted, by order.
    completed: Mapping[str, Sequence[int]]
    #: Tokens of executions whose outcome could not be stored.
    unsaved: frozenset[int]
    #: What the system downstream was asked, and what it has, by order.
    asked: Mapping[str, list[Entry]]
    receipts: Mapping[str, str | None]

    @classmethod
    def read(cls, folder: Path) -> Evidence:
        """What is in the folder of a run."""
        ledger = Ledger(folder / "ledger")
        done = {line["execution"]: line for line in ledger.read("done")}
        executions = [
            Execution(
                line["execution"],
                line["order"],
                line["task_id"],
                line["pid"],
                line["token"],
                line["at"],
                done.get(line["execution"], {}).get("at"),
                done.get(line["execution"], {}).get("receipt"),
            )
            for line in ledger.read("begun")
        ]
        order_of = {(each.task_id, each.token): each.order for each in executions}
        completed: dict[str, list[int]] = defaultdict(list)
        for line in ledger.read("completed"):
            completed[order_of[line["task_id"], line["token"]]].append(line["token"])
        evidence = cls(
            json.loads((folder / "seen.json").read_text()),
            executions,
            [Strike(**line) for line in ledger.read("struck")],
            Counter(line["task_id"] for line in ledger.read("published")),
            Counter(line["task_id"] for line in ledger.read("acknowledged")),
            completed,
            frozenset(line["token"] for line in ledger.read("unsaved")),
            downstream.entries(folder / "downstream.sqlite"),
            downstream.receipts(folder / "downstream.sqlite"),
        )
        ledger.close()
        return evidence


def judge(planned: Schedule, contestant: str, folder: Path) -> Disposition:
    """The verdict on the run that has left its evidence in `folder`."""
    evidence = Evidence.read(folder)
    seen = evidence.seen
    by_order: dict[str, list[Execution]] = defaultdict(list)
    for execution in evidence.executions:
        by_order[execution.order].append(execution)
    begin_replied = {line["task_id"] for line in seen["told"]}
    told: dict[str, set[str]] = defaultdict(set)
    for line in seen["told"]:
        told[line["order"]].add(line["told"])
    untold = [line for line in seen["untold"] if _is_nobodys(line["task_id"], evidence)]
    by_broker = {line["task_id"] for line in untold}
    lost = _lost(seen, by_order, told, by_broker)
    doubled: Counter[str] = Counter()
    notes = [f"{order}: lost" for order in lost]
    for order, executions in by_order.items():
        done = [each for each in executions if each.done_at is not None]
        if len(done) > 1:
            reason = _reason(done, executions, evidence, planned)
            doubled[reason] += 1
            notes.append(f"{order}: {len(done)} effects, {reason}")
    differing = [order for order, outcomes in told.items() if len(outcomes) > 1]
    notes += [f"{order}: outcomes differ: {sorted(told[order])}" for order in differing]
    receipts = evidence.receipts
    disagreeing = [
        order
        for order, outcomes in told.items()
        if len(outcomes) == 1 and str(receipts.get(order)) not in next(iter(outcomes))
    ]
    notes += [f"{order}: downstream has {receipts.get(order)}" for order in disagreeing]
    delays = sorted(line["at"] - line["called_at"] for line in seen["told"]) or [0.0]
    return Disposition(
        seed=planned.seed,
        contestant=contestant,
        shape=str(planned.shape),
        calls=len(begin_replied) + len(seen["untold"]) + seen["refused"],
        orders=planned.orders,
        executions=len(evidence.executions),
        faults=len(evidence.strikes),
        lost=len(lost),
        unanswered=len(seen["untold"]),
        lost_by_broker=len(by_broker),
        refused=seen["refused"],
        doubled=dict(doubled),
        completed_twice=sum(len(set(tokens)) > 1 for tokens in evidence.completed.values()),
        stale_refused=sum(map(downstream.stale_refused, evidence.asked.values())),
        stale_accepted=sum(map(downstream.stale_accepted, evidence.asked.values())),
        differing=len(differing),
        disagreeing=len(disagreeing),
        recovery=_recovery(evidence),
        median_delay=median(delays),
        longest_delay=delays[-1],
        seconds=seen["ended_at"] - seen["began_at"],
        notes=notes,
    )


def _is_nobodys(task_id: str, evidence: Evidence) -> bool:
    """Whether a copy of the message was dropped by nobody, and is nowhere."""
    dropped = evidence.acknowledged.get(task_id, 0)
    return evidence.seen["left"] == 0 and evidence.published.get(task_id, 0) > dropped


def _lost(
    seen: Mapping[str, Any],
    by_order: Mapping[str, Sequence[Execution]],
    told: Mapping[str, set[str]],
    by_broker: set[str],
) -> list[str]:
    """Orders of which something is missing that the broker's transport cannot have lost."""
    waited_for: dict[str, set[str]] = defaultdict(set)
    for line in seen["untold"]:
        waited_for[line["order"]].add(line["task_id"])
    begin_replied = [order for order in told if not any(each.done_at for each in by_order[order])]
    silent = [
        order
        for order, task_ids in waited_for.items()
        if order not in told and not task_ids <= by_broker
    ]
    return [*begin_replied, *silent]


def _recovery(evidence: Evidence) -> list[float]:
    effects = sorted(each.done_at for each in evidence.executions if each.done_at is not None)
    after = (
        next((at - trigger.until for at in effects if at >= trigger.until), None)
        for trigger in evidence.strikes
    )
    return [round(seconds, 3) for seconds in after if seconds is not None]


def _reason(
    done: Sequence[Execution],
    executions: Sequence[Execution],
    evidence: Evidence,
    planned: Schedule,
) -> str:
    """Why an order has more than one effect; the weakest of the reasons if there are several."""
    tokens = evidence.completed.get(done[0].order, ())
    winner = next((each for each in done if each.token in tokens), done[-1])
    reasons = [
        _reason_for(each, executions, evidence, planned) for each in done if each is not winner
    ]
    return UNEXPLAINED if UNEXPLAINED in reasons else reasons[0]


def _reason_for(
    loser: Execution,
    executions: Sequence[Execution],
    evidence: Evidence,
    planned: Schedule,
) -> str:
    """What befell an execution that had its effect and did not complete the order."""
    assert loser.done_at is not None
    # One that shows a lower token than who came before it was held up on its way to the body.
    held_up = any(
        each.begun_at < loser.begun_at and each.token > loser.token for each in executions
    )
    later = [each.begun_at for each in executions if each.begun_at > loser.begun_at]
    current_execution = (
        loser.begun_at - held_up * SETTLING,
        max([loser.done_at + SETTLING, *later]),
    )
    own = [
        trigger
        for trigger in evidence.strikes
        if loser.pid in trigger.pids and _overlap((trigger.at, trigger.until), current_execution)
    ]
    frozen = any(
        "frozen" in trigger.kind and trigger.until - trigger.at > LEASE * LEFT for trigger in own
    )
    killed = any(
        trigger.kind in KILLS and trigger.until >= loser.done_at - SETTLING for trigger in own
    )
    # One that died before anybody took over might as well not have been frozen.
    overtaken = held_up or any(at < loser.done_at for at in later)
    if frozen and (overtaken or not killed):
        return FROZEN
    if killed:
        return KILLED
    if loser.token in evidence.unsaved:
        return UNSAVED
    stores = [
        trigger
        for trigger in evidence.strikes
        if trigger.kind.startswith("store")
        and _overlap((trigger.at, trigger.until), current_execution)
    ]
    if (
        planned.shape.store != "single"
        and not planned.shape.wait_replicas
        and any(_may_forget(trigger, loser, evidence) for trigger in stores)
    ):
        return FORGOTTEN
    if _together(stores) > LEASE * LEFT:
        return CUT_OFF
    return UNEXPLAINED


def _may_forget(trigger: Strike, loser: Execution, evidence: Evidence) -> bool:
    """Whether what the store had acknowledged shortly before was of this execution."""
    completed = loser.token in evidence.completed.get(loser.order, ())
    return trigger.kind == STORE_KILLED and (
        completed or trigger.at - LAG <= loser.begun_at <= trigger.until
    )


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _together(strikes: Iterable[Strike]) -> float:
    return sum(trigger.until - trigger.at for trigger in strikes)
