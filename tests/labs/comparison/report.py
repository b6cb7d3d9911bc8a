"""The table: on a terminal, as Markdown, as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from rich.table import Table

from tests.labs.comparison.contestants import CONTESTANTS, OURS
from tests.labs.comparison.scenario import Cell, Row

MET, MISSED = "✓", "✗"


@dataclass(frozen=True)
class Report:
    """What a run has brought.

    Args:
        server: flavour and version.
        cells: by row and contestant.
        seconds: that it took.
    """

    rows: Sequence[Row]
    cells: Mapping[str, Mapping[str, Cell]]
    server: str
    seconds: float

    def missed(self) -> list[Row]:
        """The rows in which celery-idempotent is below what is asked."""
        return [row for row in self.rows if not row.is_met(self.cells[row.name])]

    def broken(self) -> list[tuple[Row, str, Cell]]:
        """The scenarios that broke down, with the contestant."""
        return [
            (row, contestant, cell)
            for row in self.rows
            for contestant, cell in self.cells[row.name].items()
            if cell.broken
        ]

    @property
    def setting(self) -> str:
        """Machine and versions, in a line."""
        libraries = ", ".join(f"{name} {version(name)}" for name in ("celery", "kombu", "redis"))
        return (
            f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}; "
            f"{self.server}; {libraries}"
        )

    @property
    def verdict(self) -> str:
        """Whether all is as asked, in a line."""
        missed = [row.name for row in self.missed()]
        met = len(self.rows) - len(missed)
        told = f"; below it: {', '.join(missed)}" if missed else ""
        return f"{OURS.name} is at or above what is asked in {met} of {len(self.rows)} rows{told}"

    def table(self) -> Table:
        """For a terminal."""
        table = Table(caption=self.setting, show_lines=True)
        for number, heading in enumerate(self._headings()):
            table.add_column(heading, ratio=3 if number == 0 else 2, overflow="fold")
        for line in self._lines():
            style = "" if line[-1] == MET else "bold red"
            table.add_row(*line, style=style)
        return table

    def markdown(self) -> str:
        """For a document."""
        lines = [self._headings(), ["---"] * len(self._headings()), *self._lines()]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def json(self) -> str:
        """For a program: the facts behind each cell, too."""
        rows = [
            {
                "name": row.name,
                "title": row.title,
                "asked": row.asked,
                "met": row.is_met(self.cells[row.name]),
                "cells": {
                    contestant.name: vars(self.cells[row.name][contestant.name])
                    for contestant in CONTESTANTS
                },
            }
            for row in self.rows
        ]
        facts: dict[str, Any] = {
            "setting": self.setting,
            "versions": {contestant.name: contestant.version for contestant in CONTESTANTS},
            "seconds": round(self.seconds, 1),
            "rows": rows,
        }
        return json.dumps(facts, indent=2, ensure_ascii=False)

    def _headings(self) -> list[str]:
        names = [f"{contestant.name} {contestant.version}" for contestant in CONTESTANTS]
        return ["", *names, "asked", ""]

    def _lines(self) -> list[list[str]]:
        return [
            [
                row.title,
                *(self.cells[row.name][contestant.name].text for contestant in CONTESTANTS),
                row.asked,
                MET if row.is_met(self.cells[row.name]) else MISSED,
            ]
            for row in self.rows
        ]
