"""A finding: what a check has to say."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """How much weaker the promise is."""

    #: Good to know.
    NOTE = 1
    #: Under some fault a task can be lost, run twice, or wait for long.
    WARNING = 2
    #: The promise does not hold, or nothing runs.
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that makes the promise weaker."""

    #: Of the check, for programs: ``eviction``, ``acks-late`` …
    name: str
    severity: Severity
    #: A task, a server, or ``worker``.
    subject: str
    #: What is so.
    what: str
    #: What to change: a setting and its value.
    setting: str
    #: What it means for the promise.
    why: str

    @property
    def line(self) -> str:
        """All of it in one line, for a log."""
        return f"{self.subject}: {self.what}; {self.why} (change: {self.setting})"
