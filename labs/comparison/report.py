"""The table of results: on a terminal, as Markdown, and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from rich.table import Table

from labs.comparison.contestants import CONTESTANTS, OURS
from labs.comparison.scenario import NOT_APPLICABLE, Cell, Scenario

MET, MISSED = "✓", "✗"


@dataclass(frozen=True)
class Report:
    """The results of a run.

    Args:
        cells: by scenario and contestant.
        server: flavour and version.
        seconds: the duration of the run.
    """

    scenarios: Sequence[Scenario]
    cells: Mapping[str, Mapping[str, Cell]]
    server: str
    seconds: float

    def missed(self) -> list[Scenario]:
        """Returns the scenarios in which celery-idempotent differs from the expected result."""
        return [
            scenario
            for scenario in self.scenarios
            if not scenario.is_met(self.cells[scenario.name])
        ]

    def failures(self) -> list[tuple[Scenario, str, Cell]]:
        """Returns the scenarios that failed, with the contestant."""
        return [
            (scenario, contestant, cell)
            for scenario in self.scenarios
            for contestant, cell in self.cells[scenario.name].items()
            if cell.failed
        ]

    @property
    def setting(self) -> str:
        """Machine and versions, in one line."""
        libraries = ", ".join(f"{name} {version(name)}" for name in ("celery", "kombu", "redis"))
        return (
            f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}; "
            f"{self.server}; {libraries}"
        )

    @property
    def summary(self) -> str:
        """The number of scenarios with the expected result, in one line."""
        missed = [scenario.name for scenario in self.missed()]
        met = len(self.scenarios) - len(missed)
        names = f"; not in: {', '.join(missed)}" if missed else ""
        return f"{OURS.name}: as expected in {met} of {len(self.scenarios)} scenarios{names}"

    def table(self) -> Table:
        """Returns the table for a terminal."""
        caption = "\n".join([self.setting, *self.reasons()])
        table = Table(caption=caption, show_lines=True)
        for number, heading in enumerate(self._headings()):
            table.add_column(heading, ratio=3 if number == 0 else 2, overflow="fold")
        for line in self._lines():
            style = "" if line[-1] == MET else "bold red"
            table.add_row(*line, style=style)
        return table

    def markdown(self) -> str:
        """Returns the table as Markdown."""
        lines = [self._headings(), ["---"] * len(self._headings()), *self._lines()]
        rows = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([*rows, *(f"\n{reason}" for reason in self.reasons())])

    def reasons(self) -> list[str]:
        """Returns, for each contestant, why it does not take part in some scenarios."""
        return [
            f"{NOT_APPLICABLE} {contestant.name}: " + "; ".join(reasons)
            for contestant in CONTESTANTS
            if (
                reasons := [
                    contestant.not_applicable[scenario.name]
                    for scenario in self.scenarios
                    if scenario.name in contestant.not_applicable
                ]
            )
        ]

    def json(self) -> str:
        """Returns the table with the details of each cell, for programs."""
        scenarios = [
            {
                "name": scenario.name,
                "title": scenario.title,
                "expected": scenario.expected,
                "met": scenario.is_met(self.cells[scenario.name]),
                "cells": {
                    contestant.name: vars(self.cells[scenario.name][contestant.name])
                    for contestant in CONTESTANTS
                },
            }
            for scenario in self.scenarios
        ]
        document: dict[str, Any] = {
            "setting": self.setting,
            "versions": {contestant.name: contestant.version for contestant in CONTESTANTS},
            "seconds": round(self.seconds, 1),
            "scenarios": scenarios,
        }
        return json.dumps(document, indent=2, ensure_ascii=False)

    def _headings(self) -> list[str]:
        names = [f"{contestant.name} {contestant.version}" for contestant in CONTESTANTS]
        return ["", *names, "expected", ""]

    def _lines(self) -> list[list[str]]:
        return [
            [
                scenario.title,
                *(self.cells[scenario.name][contestant.name].text for contestant in CONTESTANTS),
                scenario.expected,
                MET if scenario.is_met(self.cells[scenario.name]) else MISSED,
            ]
            for scenario in self.scenarios
        ]
