"""The findings that checks yield, and the names of all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from celery_idempotent.core.printable import one_line

#: The findings that ``doctor`` and ``health`` both report: what keeps calls from running.
CONNECTIONS = frozenset(
    ("store-unreachable", "writes-refused", "broker-unreachable", "database-unreachable")
)
#: The findings of ``health`` alone: faults of the running workers and servers.
HEALTH = frozenset(
    (
        *("bypassed", "evicted", "key-reused", "lease-expired", "memory", "no-reply"),
        *("poisoned", "purge-overdue", "rule-raised"),
    )
)
#: The findings of ``doctor`` alone: about the configuration and, with ``--against``, the new code.
CONFIGURATION = frozenset(
    (
        *("acks-late", "bursts", "clocks", "consumer-timeout", "delayed-delivery"),
        *("delivery-limit", "disabled", "eager", "eviction", "fail-open"),
        *("fused-completion", "heartbeat", "ignore-result", "key-argument", "keys-changed"),
        *("keys-unknown", "label-in-clear", "no-ack", "no-base", "not-canonical"),
        *("periodic-key", "persistence", "publishers", "recovery", "reject-on-worker-lost"),
        *("replicas", "result-retry", "result-ttl", "server-version", "shadow"),
        *("socket-timeout", "start-method", "store-result", "successful-tasks", "sweep"),
        *("task-removed", "thread-contexts", "version", "visibility-timeout"),
    )
)
NAMES = CONNECTIONS | HEALTH | CONFIGURATION


class Severity(IntEnum):
    """How badly a finding weakens the guarantees."""

    #: For information.
    NOTE = 1
    #: A fault may lose a task, run it twice or delay it for long.
    WARNING = 2
    #: The guarantees do not hold, or no task runs.
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that weakens the guarantees."""

    #: Identifies the check: ``eviction``, ``acks-late`` …
    name: str
    severity: Severity
    #: The tasks, servers or queues concerned, separated by commas; else ``broker`` or ``worker``.
    subject: str
    #: What is wrong.
    what: str
    #: What to set or change.
    setting: str
    #: The consequence.
    why: str

    @property
    def line(self) -> str:
        """The finding as one log line."""
        return one_line(f"{self.subject}: {self.what}; {self.why} (fix: {self.setting})")

    def to_json(self) -> dict[str, str]:
        """Returns the finding as a JSON object."""
        return asdict(self) | {"severity": str(self.severity)}


def joined(findings: Iterable[Finding]) -> list[Finding]:
    """Merges findings that differ only in their subject; returns the most severe first."""
    subjects: dict[Finding, list[str]] = defaultdict(list)
    for finding in findings:
        subjects[replace(finding, subject="")].append(finding.subject)
    found = [replace(each, subject=", ".join(dict.fromkeys(s))) for each, s in subjects.items()]
    return sorted(found, key=lambda finding: finding.severity, reverse=True)


class Check(NamedTuple):
    """A finding that holds if `applies` is true; the other fields are the finding's."""

    applies: object
    name: str
    severity: Severity
    what: str
    setting: str
    why: str


def applying(subject: str, *checks: Check) -> Iterator[Finding]:
    """Yields a finding for each of `checks` that applies to `subject`."""
    for applies, name, severity, *texts in checks:
        if applies:
            yield Finding(name, severity, subject, *texts)
