"""The tables of a run: on a terminal, as Markdown, and as JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from rich.table import Table

from labs.benchmarks.figure import COST_HEADINGS, Figure, MeasureResult
from labs.benchmarks.measure import FIGURES, Measure

MET, MISSED = "✓", "✗"
_MARKS = {True: MET, False: MISSED, None: ""}

#: The values of an earlier run, by measure and figure label.
MeasuredValues = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Report:
    """The results of a run.

    Args:
        setting: machine and versions, in one line.
        seconds: the duration of the run.
        before: the values of an earlier run, for comparison.
    """

    results: Mapping[Measure, MeasureResult]
    setting: str
    seconds: float
    before: MeasuredValues = field(default_factory=dict)

    def missed(self) -> list[Figure]:
        """Returns the figures that miss their goal."""
        return [each for result in self.results.values() for each in result.figures
                if each.is_met is False]  # fmt: skip

    def failures(self) -> dict[str, str]:
        """Returns the reason or traceback of each measure that failed, by name."""
        return {measure.name: result.failure
                for measure, result in self.results.items() if result.failure}  # fmt: skip

    @property
    def summary(self) -> str:
        """The number of goals that are met, in one line."""
        goals = [each for result in self.results.values() for each in result.figures
                 if each.goal]  # fmt: skip
        return f"{len(goals) - len(self.missed())} of {len(goals)} goals are met"

    def table(self) -> Table:
        """Returns the table for a terminal."""
        table = Table(caption=self.setting)
        for heading in self._headings():
            table.add_column(heading, justify="right" if heading else "left", overflow="fold")
        for measure, result in self.results.items():
            table.add_section()
            table.add_row(measure.title, style="bold")
            if result.missing:
                table.add_row(f"  {result.missing}", style="yellow")
            for figure in result.figures:
                style = "bold red" if figure.is_met is False else ""
                table.add_row(*self._line(measure, figure, indent="  "), style=style)
        return table

    def costs(self, page: str) -> str:
        """Returns what a task costs as a Markdown table."""
        lines = [cost.cells for _, result in self._results_of(page) for cost in result.costs]
        return _table(COST_HEADINGS, lines, texts=1, last="--:")

    def goals(self, page: str) -> str:
        """Returns how many goals of a page are met, and the missed ones as a Markdown table."""
        results = [*self._results_of(page)]
        count = sum(1 for _, result in results for each in result.figures if each.goal)
        lines = [
            self._line(measure, figure, title=measure.title if number == 0 else "")[:-1]
            for measure, result in results
            for number, figure in enumerate(each for each in result.figures if each.is_met is False)
        ]
        table = _table(["", *self._headings()[:-1]], lines, texts=2)
        return f"{count - len(lines)} of {count} goals are met. The others:\n\n{table}"

    def figures(self, page: str, images: Mapping[str, list[str]], section: str = FIGURES) -> str:
        """Returns the docstring, figures and plots of each measure of a section as Markdown.

        Args:
            images: paths of plots, by measure.
        """
        parts = []
        for measure, result in self._results_of(page):
            if measure.section != section:
                continue
            parts += [f"### {measure.title}", inspect.getdoc(measure) or ""]
            if result.missing:
                parts.append(f"Not measured: {result.missing}.")
            else:
                lines = [self._line(measure, figure) for figure in result.figures]
                parts.append(_markdown(self._headings(), lines))
            parts += [f"![{measure.title}]({path})" for path in images.get(measure.name, ())]
        return "\n\n".join(parts)

    def json(self) -> str:
        """Returns everything, raw values included, for :func:`parse_values` and other programs."""
        document: dict[str, Any] = {
            "setting": self.setting,
            "seconds": round(self.seconds, 1),
            "measures": {each.name: result.as_dict() for each, result in self.results.items()},
        }
        return json.dumps(_rounded(document), indent=1, ensure_ascii=False)

    def _results_of(self, page: str) -> Iterator[tuple[Measure, MeasureResult]]:
        return ((each, result) for each, result in self.results.items() if each.page == page)

    def _headings(self) -> list[str]:
        before = ["before"] if self.before else []
        return ["", *before, "measured", "interquartile range", "goal", ""]

    def _line(
        self, measure: Measure, figure: Figure, *, title: str | None = None, indent: str = ""
    ) -> list[str]:
        line = [] if title is None else [title]
        line.append(indent + figure.label)
        if self.before:
            before = self.before.get(measure.name, {}).get(figure.label)
            line.append("" if before is None else figure.with_value(before).measured)
        return [*line, figure.measured, figure.interval, figure.goal_text, _MARKS[figure.is_met]]


def parse_values(document: str) -> MeasuredValues:
    """Returns the values in a document of :meth:`Report.json`."""
    measures = json.loads(document)["measures"]
    return {
        name: {figure["label"]: figure["value"] for figure in measure["figures"]}
        for name, measure in measures.items()
    }


def _markdown(headings: list[str], lines: list[list[str]]) -> str:
    """Returns a table without the columns in which all cells are empty."""
    filled = [any(cells) for cells in zip(*lines, strict=True)]
    headings = list(compress(headings, filled))
    lines = [list(compress(line, filled)) for line in lines]
    return _table(headings, lines, texts=1, last="--:" if headings[-1] else "---")


def _table(headings: list[str], lines: list[list[str]], texts: int, last: str = "---") -> str:
    """Returns a table whose first `texts` columns are text; the others are numbers."""
    rule = ["---"] * texts + ["--:"] * (len(headings) - texts - 1) + [last]
    return "\n".join("| " + " | ".join(line) + " |" for line in [headings, rule, *lines])


def _rounded(value: Any) -> Any:
    """Rounds all floats to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
