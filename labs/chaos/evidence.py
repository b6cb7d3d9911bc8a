"""The evidence of a run: what task bodies, the downstream system and callers have recorded."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.chaos.downstream import Request, receipts_of
from labs.rig.ledger import Ledger

SENDER_KILLED = "sender of a late packet killed"


@dataclass(frozen=True)
class Execution:
    """One execution of a task body."""

    execution: str
    order: str
    task_id: str
    pid: int
    token: int
    started_at: float
    #: The time of its effect; None if it was killed or retried.
    done_at: float | None
    receipt: str | None
    this_version: bool


@dataclass(frozen=True)
class InjectedFault:
    """A fault and its affected processes; times are in seconds since the epoch."""

    kind: str
    at: float
    until: float
    pids: Sequence[int]


@dataclass(frozen=True)
class Evidence:
    """The evidence of a run."""

    observations: Mapping[str, Any]
    executions: Sequence[Execution]
    faults: Sequence[InjectedFault]
    #: Number of packets that were delivered late, by name.
    late: Mapping[str, int]
    #: By task id.
    published: Mapping[str, int]
    acknowledged: Mapping[str, int]
    #: Tokens whose completion was accepted, by order.
    completed: Mapping[str, Sequence[int]]
    #: Tokens of executions whose outcome could not be stored.
    unsaved: frozenset[int]
    #: Requests to the downstream system, and its receipts, by order.
    requests: Mapping[str, list[Request]]
    #: Number of decisions of each delivery, and the deliveries that have ended.
    decisions: Mapping[str, int]
    ended: frozenset[str]
    #: Whether the message reached a worker of this version, and of another one, by task id.
    versions: Mapping[str, set[bool]]
    #: The receipts that callers may get, by order.
    receipts: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, folder: Path) -> Evidence:
        """Reads the evidence in the folder of a run."""
        ledger = Ledger(folder / "ledger")
        observations = json.loads((folder / "observations.json").read_text())
        requests = {
            account: [Request(*each) for each in sent]
            for account, sent in observations["requests"].items()
        }
        effects = {line["execution"]: line for line in ledger.read("effect")}
        executions = []
        for line in ledger.read("started"):
            effect = effects.get(line["execution"], {})
            executions.append(
                Execution(**line, done_at=effect.get("at"), receipt=effect.get("receipt"))
            )
        order_of = {(each.task_id, each.token): each.order for each in executions}
        completed: dict[str, list[int]] = defaultdict(list)
        for line in ledger.read("completed"):
            completed[order_of[line["task_id"], line["token"]]].append(line["token"])
        versions: dict[str, set[bool]] = defaultdict(set)
        for line in ledger.read("delivered"):
            versions[line["task_id"]].add(line["this_version"])
        evidence = cls(
            observations,
            executions,
            [InjectedFault(**line) for line in ledger.read("fault")]
            + [
                InjectedFault(SENDER_KILLED, line["at"], line["at"], line["killed"])
                for line in ledger.read("late")
                if line["killed"]
            ],
            Counter(line["name"] for line in ledger.read("late")),
            Counter(line["task_id"] for line in ledger.read("published")),
            Counter(line["task_id"] for line in ledger.read("acknowledged")),
            completed,
            frozenset(line["token"] for line in ledger.read("unsaved")),
            requests,
            Counter(line["delivery"] for line in ledger.read("decided")),
            frozenset(line["delivery"] for line in ledger.read("ended")),
            versions,
            {account: receipts_of(sent) for account, sent in requests.items()},
        )
        ledger.close()
        return evidence
