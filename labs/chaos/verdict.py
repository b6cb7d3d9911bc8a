"""Evaluates a run: lost orders, duplicate effects with their reasons, differing outcomes.

It uses the records of the task bodies, the downstream system and the results of callers, and of
celery-idempotent itself only the signals about completions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from labs.chaos import downstream, orders
from labs.chaos.app import UNIT_SEPARATOR
from labs.chaos.evidence import SENDER_KILLED, Evidence, Execution, InjectedFault
from labs.chaos.schedule import LEASE, ROLLED_BACK, ROLLED_FORWARD, STORE_KILLED, Schedule
from labs.comparison.contestants import OURS

#: The reasons for duplicate effects that a library cannot prevent.
KILLED = "killed after its effect, before its completion"
FROZEN = "frozen past the lease"
DISCONNECTED = "disconnected from the store past the lease"
UNSAVED = "store unavailable for a lease after its effect, as logged"
FORGOTTEN = "lost in a failover"
#: No such reason applies.
UNEXPLAINED = "unexplained"

KILLS = (
    *("child killed", "worker killed", "parent killed", "worker stopped"),
    *(SENDER_KILLED, ROLLED_FORWARD, ROLLED_BACK),
)
#: The minimum time that a lease lasts without an extension; it is extended every third of it.
MIN_LEASE = LEASE * 2 / 3
#: Tolerance in seconds between an effect and its completion, and between begin and body.
TOLERANCE = 2.0
#: Replication lag on a busy machine, in seconds.
REPLICATION_LAG = 1.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Counts of one run."""

    seed: int
    contestant: str
    shape: str
    calls: int
    orders: int
    executions: int
    #: … by another version of the library.
    executions_of_previous: int = 0
    #: Orders with messages that reached workers of both versions; None without another one.
    orders_of_both: int | None = None
    faults: int
    #: Accepted orders without an effect, or without a result for any caller.
    lost: int
    #: Callers without a result.
    unanswered: int
    #: … whose message was lost by the broker's transport: it was published more often than
    #: acknowledged, and is not in the broker. Not included in `lost`.
    lost_by_broker: int
    #: Calls that raised an error at publish.
    rejected: int
    #: Orders with the effects of several executions, by reason.
    duplicates: Mapping[str, int] = field(default_factory=dict)
    #: Orders with two accepted completions.
    completed_twice: int
    #: Writes that the downstream system rejected.
    stale_rejected: int
    #: Writes of an execution that it accepted after a later execution had started.
    stale_accepted: int
    #: Orders whose callers got different outcomes.
    differing: int
    #: Orders whose downstream receipt differs from the outcome of their callers.
    disagreeing: int
    #: Deliveries with several decisions, or that ended without one (`signals.DECISIONS`).
    miscounted: int = 0
    #: Whether effects were rows in PostgreSQL: none may be duplicated, for whatever reason.
    transaction: bool = False
    #: Publishes that were answered by another message, which waits.
    collapsed: int = 0
    #: Executions of one order that ran at once, without a reason.
    overlaps: int = 0
    #: Those of `collapsed` whose other message had begun before the publish.
    swallowed: int = 0
    #: Number of packets that were delivered late, by name.
    late: Mapping[str, int] = field(default_factory=dict)
    #: Seconds from the end of each fault to the next effect.
    recovery: Sequence[float] = ()
    #: Seconds from a call to its result.
    median_delay: float
    longest_delay: float
    seconds: float
    #: Details of lost orders, duplicate effects and differing outcomes.
    notes: Sequence[str] = ()

    @property
    def orders_with_duplicates(self) -> int:
        """Orders with duplicate effects, for any reason."""
        return sum(self.duplicates.values())

    @property
    def keeps_promises(self) -> bool:
        """Whether celery-idempotent keeps all promises."""
        return not (
            self.lost
            or self.differing
            or self.stale_accepted
            or self.disagreeing
            or self.completed_twice
            or self.miscounted
            or self.overlaps
            or self.swallowed
            or self.orders_of_both == 0
            or self.unanswered > self.lost_by_broker
            or self.duplicates.get(UNEXPLAINED)
            or (self.transaction and self.duplicates)
        )


def judge(schedule: Schedule, contestant: str, folder: Path) -> Verdict:
    """Returns the verdict on the run with its evidence in `folder`."""
    evidence = Evidence.read(folder)
    observations = evidence.observations
    transaction, declined = schedule.shape.transaction, set[str]()
    if transaction:
        executions, rows = evidence.executions, observations["effects"]
        declined = orders.declined_units(schedule, {each.order for each in executions})
        evidence = replace(
            evidence,
            executions=orders.without_rolled_back(executions, rows),
            receipts=orders.receipts(executions, rows, declined),
        )
    by_order: dict[str, list[Execution]] = defaultdict(list)
    for execution in evidence.executions:
        by_order[execution.order].append(execution)
    answered = {line["task_id"] for line in observations["results"]}
    outcomes: dict[str, set[str]] = defaultdict(set)
    for line in observations["results"]:
        outcomes[line["order"]].add(line["outcome"])
    lost_by_broker = {
        line["task_id"]
        for line in observations["unanswered"]
        if _is_lost_by_broker(line["task_id"], evidence)
    }
    lost = _lost(observations, by_order, outcomes, lost_by_broker, declined)
    duplicates: Counter[str] = Counter()
    notes = [f"{order}: lost" for order in lost]
    for order, executions in by_order.items():
        done = [each for each in executions if each.done_at is not None]
        if len(done) > 1:
            reason = _reason(done, executions, evidence, schedule)
            duplicates[reason] += 1
            notes.append(f"{order}: {len(done)} effects, {reason}")
    differing = [order for order, each in outcomes.items() if len(each) > 1]
    notes += [f"{order}: outcomes differ: {sorted(outcomes[order])}" for order in differing]
    overlaps = orders.overlaps(
        evidence.executions,
        lambda *pair: (
            not transaction and _reason_for(pair[0], pair, evidence, schedule) != UNEXPLAINED
        ),
        # Executions without the store have no token.
        lambda each: each.started_at if transaction else each.token,
    )
    notes += [f"{order}: executions at once" for order in overlaps]
    collapsed = observations.get("collapsed", [])
    swallowed = [line["order"] for line in collapsed if orders.is_swallowed(line, by_order)]
    notes += [f"{order}: a publish was swallowed" for order in swallowed]
    receipts = evidence.receipts
    disagreeing = [
        order
        for order, each in outcomes.items()
        if len(each) == 1
        and not any(receipt in next(iter(each)) for receipt in receipts.get(order, ()))
    ]
    notes += [f"{order}: downstream has {receipts.get(order)}" for order in disagreeing]
    delays = sorted(line["at"] - line["called_at"] for line in observations["results"]) or [0.0]
    return Verdict(
        seed=schedule.seed,
        contestant=contestant,
        shape=str(schedule.shape),
        calls=len(answered)
        + len(observations["unanswered"])
        + observations["rejected"]
        + len(collapsed),
        orders=schedule.orders,
        executions=len(evidence.executions),
        executions_of_previous=sum(not each.this_version for each in evidence.executions),
        orders_of_both=_orders_of_both(evidence)
        if any(fault.kind == ROLLED_BACK for fault in evidence.faults)
        else None,
        faults=len(evidence.faults),
        lost=len(lost),
        unanswered=len(observations["unanswered"]),
        lost_by_broker=len(lost_by_broker),
        rejected=observations["rejected"],
        duplicates=dict(duplicates),
        transaction=transaction,
        completed_twice=sum(len(set(tokens)) > 1 for tokens in evidence.completed.values()),
        stale_rejected=sum(map(downstream.stale_rejected, evidence.requests.values())),
        stale_accepted=sum(map(downstream.stale_accepted, evidence.requests.values())),
        differing=len(differing),
        collapsed=len(collapsed),
        overlaps=len(overlaps),
        swallowed=len(swallowed),
        disagreeing=len(disagreeing),
        miscounted=_miscounted(evidence) if contestant == OURS.name else 0,
        late=dict(evidence.late),
        recovery=_recovery(evidence),
        median_delay=median(delays),
        longest_delay=delays[-1],
        seconds=observations["ended_at"] - observations["started_at"],
        notes=notes,
    )


def _orders_of_both(evidence: Evidence) -> int:
    versions: dict[str, set[bool]] = defaultdict(set)
    for line in evidence.observations["results"]:
        order = line["order"].partition(UNIT_SEPARATOR)[0]
        versions[order] |= evidence.versions.get(line["task_id"], set())
    return sum(len(each) == 2 for each in versions.values())


def _miscounted(evidence: Evidence) -> int:
    undecided = sum(delivery not in evidence.decisions for delivery in evidence.ended)
    return undecided + sum(number > 1 for number in evidence.decisions.values())


def _is_lost_by_broker(task_id: str, evidence: Evidence) -> bool:
    """Whether the message was published more often than acknowledged, and is not in the broker."""
    acknowledged = evidence.acknowledged.get(task_id, 0)
    published = evidence.published.get(task_id, 0)
    return evidence.observations["messages_left"] == 0 and published > acknowledged


def _lost(
    observations: Mapping[str, Any],
    by_order: Mapping[str, Sequence[Execution]],
    outcomes: Mapping[str, set[str]],
    lost_by_broker: set[str],
    declined: set[str],
) -> list[str]:
    """Returns the orders without an effect or a result that the broker's transport has not lost.

    Args:
        declined: the orders that are to have no effect.
    """
    waited_for: dict[str, set[str]] = defaultdict(set)
    for line in observations["unanswered"]:
        waited_for[line["order"]].add(line["task_id"])
    without_effect = [
        order
        for order in outcomes.keys() - declined
        if not any(each.done_at for each in by_order[order])
    ]
    without_result = [
        order
        for order, task_ids in waited_for.items()
        if order not in outcomes and not task_ids <= lost_by_broker
    ]
    return [*without_effect, *without_result]


def _recovery(evidence: Evidence) -> list[float]:
    effects = sorted(each.done_at for each in evidence.executions if each.done_at is not None)
    delays = (
        next((at - fault.until for at in effects if at >= fault.until), None)
        for fault in evidence.faults
    )
    return [round(seconds, 3) for seconds in delays if seconds is not None]


def _reason(
    done: Sequence[Execution],
    executions: Sequence[Execution],
    evidence: Evidence,
    schedule: Schedule,
) -> str:
    """Returns why an order has several effects: `UNEXPLAINED` if one of them is."""
    tokens = evidence.completed.get(done[0].order, ())
    winner = next((each for each in done if each.token in tokens), done[-1])
    reasons = [
        _reason_for(each, executions, evidence, schedule) for each in done if each is not winner
    ]
    return UNEXPLAINED if UNEXPLAINED in reasons else reasons[0]


def _reason_for(
    loser: Execution,
    executions: Sequence[Execution],
    evidence: Evidence,
    schedule: Schedule,
) -> str:
    """Returns why an execution had its effect without completing the order."""
    assert loser.done_at is not None
    # Its body started late if an execution with a higher token had started before.
    delayed = any(
        each.started_at < loser.started_at and each.token > loser.token for each in executions
    )
    later = [each.started_at for each in executions if each.started_at > loser.started_at]
    interval = (
        loser.started_at - delayed * TOLERANCE,
        max([loser.done_at + TOLERANCE, *later]),
    )
    own = [
        fault
        for fault in evidence.faults
        if loser.pid in fault.pids and _overlap((fault.at, fault.until), interval)
    ]
    frozen = any("frozen" in fault.kind and fault.until - fault.at > MIN_LEASE for fault in own)
    killed = any(fault.kind in KILLS and fault.until >= loser.done_at - TOLERANCE for fault in own)
    # A process that was killed before any takeover would not have needed to be frozen.
    overtaken = delayed or any(at < loser.done_at for at in later)
    if frozen and (overtaken or not killed):
        return FROZEN
    if killed:
        return KILLED
    if loser.token in evidence.unsaved:
        return UNSAVED
    stores = [
        fault
        for fault in evidence.faults
        if fault.kind.startswith("store") and _overlap((fault.at, fault.until), interval)
    ]
    if (
        schedule.shape.store != "single"
        and not schedule.shape.wait_replicas
        and any(_may_lose_begin(fault, loser, evidence) for fault in stores)
    ):
        return FORGOTTEN
    if sum(fault.until - fault.at for fault in stores) > MIN_LEASE:
        return DISCONNECTED
    return UNEXPLAINED


def _may_lose_begin(fault: InjectedFault, loser: Execution, evidence: Evidence) -> bool:
    """Whether the begin of the execution may not have been replicated before a failover."""
    completed = loser.token in evidence.completed.get(loser.order, ())
    return fault.kind == STORE_KILLED and (
        completed or fault.at - REPLICATION_LAG <= loser.started_at <= fault.until
    )


def _overlap(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return first[0] <= second[1] and second[0] <= first[1]
