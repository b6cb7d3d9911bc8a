"""The tables: on a terminal, as Markdown, as JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from tests.labs.benchmarks.figure import Figure, Finding
from tests.labs.benchmarks.measure import Measure

MET, MISSED = "✓", "✗"
_MARKS = {True: MET, False: MISSED, None: ""}

#: Values of an earlier run: by measure, then by figure.
Before = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Report:
    """What a run has brought.

    Args:
        setting: machine and versions, in a line.
        seconds: that it took.
        before: values of an earlier run, to stand beside.
    """

    findings: Mapping[Measure, Finding]
    setting: str
    seconds: float
    before: Before = field(default_factory=dict)

    def missed(self) -> list[Figure]:
        """The figures that do not come to what is asked."""
        return [each for finding in self.findings.values() for each in finding.figures
                if each.is_met is False]  # fmt: skip

    def broken(self) -> dict[str, str]:
        """Why each measure that broke down, or had no time, did: by name, with a traceback."""
        return {measure.name: finding.broken
                for measure, finding in self.findings.items() if finding.broken}  # fmt: skip

    @property
    def verdict(self) -> str:
        """How many goals are met, in a line."""
        goals = [each for finding in self.findings.values() for each in finding.figures
                 if each.goal]  # fmt: skip
        return f"{len(goals) - len(self.missed())} of {len(goals)} goals are met"

    def table(self) -> Table:
        """For a terminal."""
        table = Table(caption=self.setting)
        for heading in self._headings():
            left = heading in ("", "measure")
            table.add_column(heading, justify="left" if left else "right", overflow="fold")
        for measure, finding in self.findings.items():
            table.add_section()
            table.add_row(measure.title, style="bold")
            if finding.why_not:
                table.add_row(f"  {finding.why_not}", style="yellow")
            for figure in finding.figures:
                style = "bold red" if figure.is_met is False else ""
                table.add_row(*self._line(measure, figure, indent="  "), style=style)
        return table

    def goals(self, page: str) -> str:
        """Markdown: what was asked, and what came of it, measure by measure."""
        lines = [
            self._line(measure, figure, title=measure.title if number == 0 else "")
            for measure, finding in self._of(page)
            for number, figure in enumerate(each for each in finding.figures if each.goal)
        ]
        return _markdown(["", *self._headings()], lines)

    def figures(self, page: str, images: Mapping[str, list[str]]) -> str:
        """Markdown: each measure, how it measures, and all that it has found.

        Args:
            images: paths of plots, by measure.
        """
        parts = []
        for measure, finding in self._of(page):
            parts += [f"### {measure.title}", inspect.getdoc(measure) or ""]
            if finding.why_not:
                parts.append(f"Not measured: {finding.why_not}.")
            else:
                lines = [self._line(measure, figure) for figure in finding.figures]
                parts.append(_markdown(self._headings(), lines))
            parts += [f"![{measure.title}]({path})" for path in images.get(measure.name, ())]
        return "\n\n".join(parts)

    def json(self) -> str:
        """For a program, and for a later run to compare itself with: the raw values, too."""
        facts: dict[str, Any] = {
            "setting": self.setting,
            "seconds": round(self.seconds, 1),
            "measures": {each.name: found.facts() for each, found in self.findings.items()},
        }
        return json.dumps(_rounded(facts), indent=1, ensure_ascii=False)

    def _of(self, page: str) -> Iterator[tuple[Measure, Finding]]:
        return ((each, found) for each, found in self.findings.items() if each.page == page)

    def _headings(self) -> list[str]:
        before = ["before"] if self.before else []
        return ["", *before, "measured", "middle half", "asked", ""]

    def _line(
        self, measure: Measure, figure: Figure, *, title: str | None = None, indent: str = ""
    ) -> list[str]:
        line = [] if title is None else [title]
        line.append(indent + figure.what)
        if self.before:
            earlier = self.before.get(measure.name, {}).get(figure.what)
            line.append("" if earlier is None else figure.with_value(earlier).measured)
        return [*line, figure.measured, figure.around, figure.asked, _MARKS[figure.is_met]]


def earlier(facts: str) -> Before:
    """The values in what :meth:`Report.json` gave."""
    measures = json.loads(facts)["measures"]
    return {
        name: {figure["what"]: figure["value"] for figure in measure["figures"]}
        for name, measure in measures.items()
    }


def _markdown(headings: list[str], lines: list[list[str]]) -> str:
    texts = sum(1 for heading in headings if not heading) - 1
    rule = ["---"] * texts + ["--:"] * (len(headings) - texts - 1) + ["---"]
    return "\n".join("| " + " | ".join(line) + " |" for line in [headings, rule, *lines])


def _rounded(facts: Any) -> Any:
    """Four digits say all that a measurement knows."""
    if isinstance(facts, float):
        return float(f"{facts:.4g}")
    if isinstance(facts, dict):
        return {name: _rounded(each) for name, each in facts.items()}
    return [_rounded(each) for each in facts] if isinstance(facts, list | tuple) else facts
