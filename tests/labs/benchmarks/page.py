"""Writes generated tables into the pages of docs/, between marks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.labs.benchmarks.report import Report

DOCS = Path(__file__).parents[3] / "docs"
#: Folder of the plots and the raw values, in docs/.
FOLDER = "benchmarks"
FIGURES = f"{FOLDER}/figures.json"


def write(report: Report, images: Mapping[str, list[str]]) -> list[Path]:
    """Writes the tables into their pages and the raw values beside the plots.

    Returns the written files.
    """
    pages = sorted({measure.page for measure in report.results})
    for page in pages:
        path = DOCS / f"{page}.md"
        text = path.read_text(encoding="utf-8")
        text = replace_section(text, "setting", report.setting)
        text = replace_section(text, "goals", report.goals(page))
        text = replace_section(text, "figures", report.figures(page, images))
        path.write_text(text, encoding="utf-8")
    (DOCS / FIGURES).write_text(report.json() + "\n", encoding="utf-8")
    return [*(DOCS / f"{page}.md" for page in pages), DOCS / FIGURES]


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
