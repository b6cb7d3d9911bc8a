"""The table of all outages: on a terminal, and as Markdown."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import compress

from rich.table import Table

from labs.outages.outage import Outage
from labs.outages.verdict import Verdict

MET, MISSED = "✓", "✗"

HEADINGS = (
    "outage",
    "messages / keys",
    "executed",
    "lost",
    "executed twice",
    "results differ",
    "errors",
    "last result after",
    "postponed (maximum per message)",
    "rejected within: median, longest",
    "timeouts",
    "",
)
#: The page has the others.
NOT_ON_THE_PAGE = ("messages / keys", "rejected within: median, longest", "timeouts")


@dataclass(frozen=True)
class Report:
    """The verdicts on all outages.

    Args:
        server: flavour and version.
        seconds: the duration of all runs.
    """

    verdicts: Mapping[Outage, Verdict]
    server: str
    seconds: float

    def missed(self) -> list[Outage]:
        """Returns the outages that broke a promise."""
        return [outage for outage, verdict in self.verdicts.items() if not is_met(outage, verdict)]

    @property
    def setting(self) -> str:
        """Machine and versions, in one line."""
        libraries = ", ".join(f"{name} {version(name)}" for name in ("celery", "kombu", "redis"))
        return (
            f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}; "
            f"{self.server}; {libraries}"
        )

    def table(self) -> Table:
        """Returns the table for a terminal."""
        table = Table(caption=self.setting, show_lines=True)
        for number, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
        for outage, verdict in self.verdicts.items():
            style = "" if is_met(outage, verdict) else "bold red"
            table.add_row(*_line(outage, verdict), style=style)
        return table

    def markdown(self) -> str:
        """Returns the table of docs/contributing/outages.md."""
        lines = [HEADINGS, ["---"] + ["--:"] * (len(HEADINGS) - 1)]
        lines += [_line(outage, verdict) for outage, verdict in self.verdicts.items()]
        chosen = [heading not in NOT_ON_THE_PAGE for heading in HEADINGS]
        return "\n".join("| " + " | ".join(compress(line, chosen)) + " |" for line in lines)


def is_met(outage: Outage, verdict: Verdict) -> bool:
    """Whether nothing is lost, and nothing else happened that the outage may not cause."""
    may_execute_twice = bool(outage.may_execute_twice)
    return (
        verdict.lost == 0
        and (outage.affects_broker or verdict.undelivered == 0)
        and (may_execute_twice or (verdict.executed_twice == 0 and verdict.differing == 0))
        and (bool(outage.may_raise) or verdict.errors == 0)
        and verdict.unsaved == 0
    )


def _line(outage: Outage, verdict: Verdict) -> list[str]:
    rejected_us = f"{verdict.median_us}, {verdict.longest_us} µs" if verdict.longest_us else "–"
    lost = f"{verdict.lost}"
    if verdict.undelivered:
        lost += f" (and {verdict.undelivered} by the broker)"
    executed_twice = f"{verdict.executed_twice}"
    if verdict.executed_twice and outage.may_execute_twice:
        executed_twice += f" ({outage.may_execute_twice})"
    return [
        outage.title,
        f"{verdict.messages} / {verdict.keys}",
        f"{verdict.executed}",
        lost,
        executed_twice,
        f"{verdict.differing}",
        f"{verdict.errors}",
        f"{verdict.settled_after:.1f} s",
        f"{verdict.rejections} ({verdict.most_rejections})",
        rejected_us,
        f"{verdict.timeouts}",
        MET if is_met(outage, verdict) else MISSED,
    ]
