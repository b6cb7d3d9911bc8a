"""The tables of a run: as Markdown, and as JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Any

from labs.benchmarks.figure import COST_HEADINGS, Figure, MeasureResult, with_unit
from labs.benchmarks.measure import FIGURES, Measure
from labs.rig.report import MET, MISSED, markdown

_MARKS = {True: MET, False: MISSED, None: ""}

#: The values of an earlier run, by measure and figure label.
MeasuredValues = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Report:
    """The results of a run.

    Args:
        setting: machine and versions, in one line.
        before: the values of an earlier run, for comparison.
    """

    results: Mapping[Measure, MeasureResult]
    setting: str
    before: MeasuredValues = field(default_factory=dict)

    def missed(self) -> list[Figure]:
        """Returns the figures that miss their goal."""
        return [figure for figure in self._with_goal() if not figure.is_met]

    def failures(self) -> dict[str, str]:
        """Returns the reason or traceback of each measure that failed, by name."""
        return {
            measure.name: result.failure
            for measure, result in self.results.items()
            if result.failure
        }

    @property
    def summary(self) -> str:
        """The number of goals that are met, in one line."""
        goals = len(self._with_goal())
        return f"{goals - len(self.missed())} of {goals} goals are met."

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
                    f"Not measured: {result.missing}."
                    if result.missing
                    else self._table(measure, result)
                )
        return "\n\n".join(parts)

    def json(self) -> str:
        """Returns all figures, for :func:`parse_values` and other programs."""
        document: dict[str, Any] = {
            "setting": self.setting,
            "measures": {each.name: asdict(result) for each, result in self.results.items()},
        }
        return json.dumps(_rounded(document), indent=1, ensure_ascii=False)

    def _with_goal(self) -> list[Figure]:
        return [
            figure for result in self.results.values() for figure in result.figures if figure.goal
        ]

    def _table(self, measure: Measure, result: MeasureResult) -> str:
        """Returns the figures of a measure, without the columns in which all cells are empty."""
        headings = ["", "before", "measured", "interquartile range", "goal", ""]
        lines = []
        for figure in result.figures:
            before = self.before.get(measure.name, {}).get(figure.label)
            texts = [
                "" if before is None else with_unit(before, figure.unit),
                *(figure.measured, figure.interval, figure.goal_text, _MARKS[figure.is_met]),
            ]
            lines.append([figure.label, *texts])
        filled = [any(cells) for cells in zip(*lines, strict=True)]
        return markdown(
            list(compress(headings, filled)), [list(compress(line, filled)) for line in lines]
        )


def parse_values(document: str) -> MeasuredValues:
    """Returns the values in a document of :meth:`Report.json`."""
    measures = json.loads(document)["measures"]
    return {
        name: {figure["label"]: figure["value"] for figure in measure["figures"]}
        for name, measure in measures.items()
    }


def _rounded(value: Any) -> Any:
    """Rounds all floats to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
