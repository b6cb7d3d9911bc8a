"""The table: on a terminal, and as Markdown."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from rich.table import Table

from tests.labs.outages.outage import Outage
from tests.labs.outages.verdict import Disposition

MET, MISSED = "✓", "✗"

HEADINGS = (
    "outage",
    "messages / keys",
    "executed",
    "lost",
    "doubled",
    "results differ",
    "told an error",
    "last answer after",
    "put off (most, of one)",
    "refused within: median, longest",
    "timed out",
    "",
)


@dataclass(frozen=True)
class Report:
    """What all runs have brought.

    Args:
        server: flavour and version.
        seconds: that it took.
    """

    verdicts: Mapping[Outage, Disposition]
    server: str
    seconds: float

    def missed(self) -> list[Outage]:
        """Outages that did what they may not do."""
        return [outage for outage, verdict in self.verdicts.items() if not is_met(outage, verdict)]

    @property
    def setting(self) -> str:
        """Machine and versions, in a line."""
        libraries = ", ".join(f"{name} {version(name)}" for name in ("celery", "kombu", "redis"))
        return (
            f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}; "
            f"{self.server}; {libraries}"
        )

    def table(self) -> Table:
        """For a terminal."""
        table = Table(caption=self.setting, show_lines=True)
        for number, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
        for outage, verdict in self.verdicts.items():
            style = "" if is_met(outage, verdict) else "bold red"
            table.add_row(*_line(outage, verdict), style=style)
        return table

    def markdown(self) -> str:
        """For a document."""
        lines = [HEADINGS, ["---"] + ["--:"] * (len(HEADINGS) - 1)]
        lines += [_line(outage, verdict) for outage, verdict in self.verdicts.items()]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def is_met(outage: Outage, verdict: Disposition) -> bool:
    """Whether nothing is lost, and nothing happened but what the outage may do."""
    may_double = bool(outage.may_double)
    return (
        verdict.lost == 0
        and (outage.strikes_broker or verdict.undelivered == 0)
        and (may_double or (verdict.doubled == 0 and verdict.differing == 0))
        and (bool(outage.may_tell) or verdict.told == 0)
        and verdict.unsaved == 0
    )


def _line(outage: Outage, verdict: Disposition) -> list[str]:
    run_sync = f"{verdict.median_us}, {verdict.longest_us} µs" if verdict.longest_us else "–"
    lost = f"{verdict.lost}"
    if verdict.undelivered:
        lost += f" (and {verdict.undelivered} by the broker)"
    doubled = f"{verdict.doubled}"
    if verdict.doubled and outage.may_double:
        doubled += f" ({outage.may_double})"
    return [
        outage.title,
        f"{verdict.messages} / {verdict.keys}",
        f"{verdict.executed}",
        lost,
        doubled,
        f"{verdict.differing}",
        f"{verdict.told}",
        f"{verdict.settled_after:.1f} s",
        f"{verdict.refusals} ({verdict.most_refusals})",
        run_sync,
        f"{verdict.timeouts}",
        MET if is_met(outage, verdict) else MISSED,
    ]
