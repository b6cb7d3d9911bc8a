"""The tables of a run: as Markdown, and as JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import compress
from typing import Any

from labs.benchmarks.figure import COST_HEADINGS, MeasureResult
from labs.benchmarks.measure import FIGURES, Measure
from labs.rig.report import MET, MISSED, markdown

_MARKS = {True: MET, False: MISSED, None: ""}


@dataclass(frozen=True)
class Report:
    """The results of a run.

    Args:
        setting: machine and versions, in one line.
    """

    results: Mapping[Measure, MeasureResult]
    setting: str

    @property
    def summary(self) -> str:
        """The number of goals that are met, in one line."""
        every = [figure.is_met for result in self.results.values() for figure in result.figures]
        return f"{every.count(True)} of {len(every) - every.count(None)} goals are met."

    def costs(self) -> str:
        """Returns what a task costs as a Markdown table."""
        lines = [cost.cells for result in self.results.values() for cost in result.costs]
        return markdown(COST_HEADINGS, lines)

    def figures(self, section: str = FIGURES) -> str:
        """Returns the docstring and the figures of each measure of a section as Markdown."""
        parts = []
        for measure, result in self.results.items():
            if measure.section == section:
                parts += [f"### {measure.title}", inspect.getdoc(measure) or ""]
                parts.append(
                    f"Not measured: {result.failure}" if result.failure else self._table(result)
                )
        return "\n\n".join(parts)

    def json(self) -> str:
        """Returns all figures, for other programs."""
        document: dict[str, Any] = {
            "setting": self.setting,
            "measures": {each.name: asdict(result) for each, result in self.results.items()},
        }
        return json.dumps(_rounded(document), indent=1, ensure_ascii=False)

    @staticmethod
    def _table(result: MeasureResult) -> str:
        """Returns the figures of a measure, without the columns in which all cells are empty."""
        headings = ["", "measured", "interquartile range", "goal", ""]
        lines = [
            [each.label, each.measured, each.interval, each.goal_text, _MARKS[each.is_met]]
            for each in result.figures
        ]
        filled = [any(cells) for cells in zip(*lines, strict=True)]
        return markdown(
            list(compress(headings, filled)), [list(compress(line, filled)) for line in lines]
        )


def _rounded(value: Any) -> Any:
    """Rounds all floats to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
