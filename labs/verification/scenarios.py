"""The scenarios of the search: what is published, by how many at once, and which faults happen."""

from __future__ import annotations

from typing import NamedTuple

#: What may go wrong, each at most as often as a scenario allows.
FAULTS = {
    "kill": "a child, or a whole host, is killed",
    "freeze": "a process is frozen past its lease, and resumed",
    "server frozen": "the server is frozen past a lease, and then executes what was sent to it",
    "copy": "the broker delivers a message once more",
    "lost": "a reply is lost, and the command is sent again, or the message put back",
    "late": "a command is executed after its sender has given up",
    "error": "the body raises an error, which frees the key",
    "failed": "the body raises an error that is stored for its duplicates",
    "retry": "the body retries",
    "hard": "a child exceeds its hard time limit, and lives a moment longer",
    "slow": "a message or its retry comes after the end of its reservation",
    "clock": "the server's clock falls back",
    "publisher": "a publisher dies after its reservation",
    "forget": "an operator forgets the key",
    "replaced": "the task replaces itself with another one",
    "old worker": "a worker whose code does not know the slot begins the message",
    "expiry": "the retention of an outcome ends",
    "failover": "a replica without the last write is promoted",
    "again": "a marked lease ends before its execution's heartbeat: the server is frozen again, or "
    "the lease of the begin that has marked it is shorter",
}


class Scenario(NamedTuple):
    """One environment of the protocol."""

    #: ``task`` (TASK_ID), ``expired``, ``finished`` or ``started``: the modes of a key.
    mode: str
    #: Messages that are published without a reservation, and with one.
    direct: str
    queued: str
    #: Deliveries that are handled at once.
    workers: int
    faults: dict[str, int]
    #: ``continues``: messages have a continuation; ``chord``: it is that of the parts of a chord.
    #: ``replace``: the last message replaces a running call; ``older``: one with a slot answers for
    #: a dead one. ``arguments``: the newest ones win; ``large``: they are too large to be stored;
    #: ``quiet``: publishes delay the begin.
    options: frozenset[str] = frozenset()


def _scenario(
    mode: str, direct: str, queued: str, workers: int, *options: str, **faults: int
) -> Scenario:
    named = {name.replace("_", " "): number for name, number in faults.items()}
    return Scenario(mode, direct, queued, workers, named, frozenset(options))


SCENARIOS: dict[str, Scenario] = {
    "expired: crash": _scenario("expired", "ab", "", 2, kill=2, lost=1, copy=1),
    "expired: freeze": _scenario("expired", "ab", "", 2, kill=1, freeze=1, copy=1, lost=1),
    "expired: frozen twice": _scenario("expired", "ab", "", 2, freeze=2, kill=1),
    "expired: late": _scenario("expired", "ab", "", 2, late=2, server_frozen=2, error=1, retry=1),
    "expired: late and killed": _scenario(
        "expired", "ab", "", 2, late=2, kill=1, server_frozen=2, copy=1
    ),
    "expired: continuation": _scenario(
        "expired", "ab", "", 2, "continues", kill=1, copy=1, server_frozen=1, late=1
    ),
    "expired: frozen sender": _scenario(
        "expired", "ab", "", 2, "continues", kill=1, freeze=1, copy=1
    ),
    "expired: three senders": _scenario("expired", "a", "", 3, "continues", kill=1, copy=2),
    "expired: chord": _scenario("expired", "ab", "", 2, "chord", kill=1, copy=1),
    "task id: chord": _scenario("task", "ab", "", 2, "chord", kill=1, copy=1),
    "turn: chord": _scenario("turn", "ab", "", 2, "chord", kill=1, copy=1),
    "expired: errback": _scenario("expired", "ab", "", 2, "continues", failed=1, kill=1, copy=1),
    "expired: retry": _scenario("expired", "ab", "", 2, retry=2, copy=1, late=1, slow=1),
    "expired: hard limit": _scenario("expired", "ab", "", 2, hard=1, kill=1, late=1, copy=1),
    "expired: replaced task": _scenario("expired", "ab", "", 2, replaced=1, copy=1, late=1, kill=1),
    "expired: replace": _scenario("expired", "ab", "", 2, "replace", late=2, kill=1),
    "expired: reserved": _scenario("expired", "", "abc", 2, error=1, late=1, lost=1, kill=1),
    "expired: lost": _scenario("expired", "ab", "", 2, lost=2, kill=1, freeze=1),
    "expired: mixed": _scenario(
        "expired", "ab", "", 2, lost=1, kill=1, server_frozen=1, error=1, late=1
    ),
    "expired: retention": _scenario("expired", "ab", "", 2, expiry=1, kill=1, copy=1, failed=1),
    "task id": _scenario("task", "ab", "", 2, lost=1, kill=1, copy=1, error=1),
    "turn: lost": _scenario("turn", "ab", "", 2, lost=1, freeze=1, server_frozen=1, kill=1),
    "turn: mixed": _scenario("turn", "ab", "", 2, late=1, server_frozen=1, error=1, kill=1, copy=1),
    "turn: crash": _scenario("turn", "ab", "", 2, kill=2, copy=1),
    "turn: freeze": _scenario("turn", "ab", "", 2, kill=1, freeze=1, copy=1),
    "turn: frozen twice": _scenario("turn", "ab", "", 2, freeze=2, kill=1),
    "turn: late": _scenario("turn", "ab", "", 2, late=2, server_frozen=2, error=1, kill=1),
    "turn: three": _scenario("turn", "abc", "", 2, kill=1, lost=1),
    "turn: copies": _scenario("turn", "ab", "", 3, copy=1, late=1, lost=1, kill=1, clock=1),
    "turn: retry": _scenario("turn", "ab", "", 2, retry=1, kill=1, copy=1, slow=1, late=1),
    "turn: replace": _scenario("turn", "ab", "", 2, "replace", late=2, kill=1, copy=1, retry=1),
    "turn: continuation": _scenario(
        "turn", "ab", "", 2, "continues", kill=1, copy=1, lost=1, server_frozen=1
    ),
    "turn: errback": _scenario("turn", "ab", "", 2, "continues", failed=1, kill=1, copy=1),
    "turn: replace a sender": _scenario(
        "turn", "ab", "", 2, "continues", "replace", kill=1, copy=2
    ),
    "turn: forget": _scenario("turn", "ab", "", 2, forget=1, late=1, kill=1, copy=1),
    "turn: hard limit": _scenario("turn", "ab", "", 2, hard=1, kill=1, late=1),
    "turn: retention": _scenario("turn", "ab", "", 2, expiry=1, kill=1, copy=1),
    "finished: reserved": _scenario("finished", "", "abc", 2, error=1, late=1, kill=1),
    "started: reserved": _scenario("started", "", "abc", 2, "arguments", error=1, late=2, kill=1),
    "started: lost": _scenario(
        "started", "", "abc", 2, "arguments", error=1, lost=2, kill=1, publisher=1
    ),
    "started: retry": _scenario(
        "started", "", "abc", 2, "arguments", retry=1, kill=1, slow=1, copy=1
    ),
    "started: quiet": _scenario(
        "started", "", "abc", 2, "arguments", "quiet", late=1, kill=1, server_frozen=1
    ),
    "started: large": _scenario(
        "started", "", "abc", 2, "large", "quiet", error=1, kill=1, lost=1, slow=1
    ),
    "started: older": _scenario("started", "", "abc", 2, "arguments", "older", kill=2, freeze=1),
    "started: rolling deploy": _scenario(
        "started", "", "abc", 2, "arguments", old_worker=1, kill=1
    ),
    "started: slow": _scenario("started", "", "abcd", 2, "arguments", slow=1, kill=1, error=1),
}

#: Faults beyond the promises: the search has to find the violation.
LIMITS: dict[str, tuple[Scenario, str]] = {
    "the server is frozen twice within a tenth of a lease": (
        _scenario("expired", "ab", "", 2, server_frozen=1, again=1),
        "two executions trust their leases",
    ),
    "a failover loses a begin": (
        _scenario("expired", "ab", "", 2, failover=1),
        "two executions trust their leases",
    ),
    "a failover loses an outcome": (
        _scenario("expired", "ab", "", 1, failover=1),
        "b runs after a has completed K",
    ),
}

#: Scenarios that take longer than the others: they come last when a mistake is searched for.
LARGE = (
    "expired: crash", "turn: crash", "started: lost", "started: retry", "started: slow",
    "turn: retry", "turn: freeze", "turn: lost", "turn: mixed", "expired: mixed",
)  # fmt: skip
