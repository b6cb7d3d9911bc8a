"""Writes generated tables into docs/contributing/benchmarks.md, between marks."""

from __future__ import annotations

from pathlib import Path

from labs.benchmarks.measure import FIGURES
from labs.benchmarks.report import Report

PAGE = Path(__file__).parents[2] / "docs/contributing/benchmarks.md"
VALUES = PAGE.parent / "benchmarks" / "figures.json"


def write(report: Report) -> None:
    """Writes the tables of the run into the page, and the figures of `FIGURES` beside it."""
    text = PAGE.read_text(encoding="utf-8")
    for section in {measure.section for measure in report.results}:
        figures = report.figures(section)
        if section == FIGURES:
            text = replace_section(text, FIGURES, f"{report.summary}\n\n{figures}")
            text = replace_section(text, "setting", report.setting)
            text = replace_section(text, "costs", report.costs())
            VALUES.write_text(report.json() + "\n", encoding="utf-8")
        else:  # measured at another time
            text = replace_section(text, section, f"Measured on: {report.setting}\n\n{figures}")
    PAGE.write_text(text, encoding="utf-8")


def replace_section(text: str, name: str, content: str) -> str:
    """Returns `text` with `content` between the marks of that name, if it has these marks."""
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(first)
    if not found:
        return text
    _, found, after = rest.partition(last)
    if not found:
        raise ValueError(f"{first} has no end mark: add {last}")
    return f"{before}{first}\n\n{content}\n\n{last}{after}"
