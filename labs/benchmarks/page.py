"""Writes generated tables into the pages of docs/contributing/, between marks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from labs.benchmarks.measure import FIGURES
from labs.benchmarks.report import Report

DOCS = Path(__file__).parents[2] / "docs/contributing"
#: Folder of the plots and the raw values, in docs/contributing/.
FOLDER = "benchmarks"
VALUES = f"{FOLDER}/figures.json"


def write(report: Report, images: Mapping[str, list[str]]) -> list[Path]:
    """Writes the tables into their pages and the raw values beside the plots.

    Returns the written files.
    """
    pages = sorted({(measure.page, measure.section) for measure in report.results})
    written = [DOCS / f"{page}.md" for page, _ in pages]
    for path, (page, section) in zip(written, pages, strict=True):
        text = path.read_text(encoding="utf-8")
        figures = report.figures(page, images, section)
        if section == FIGURES:
            text = replace_section(text, FIGURES, figures)  # figures.json has those without a mark
            text = replace_section(text, "setting", report.setting)
            text = replace_section(text, "costs", report.costs(page))
            text = replace_section(text, "goals", report.goals(page))
        else:  # measured at another time
            text = replace_section(text, section, f"Measured on: {report.setting}\n\n{figures}")
        path.write_text(text, encoding="utf-8")
    if any(section == FIGURES for _, section in pages):
        (DOCS / VALUES).write_text(report.json() + "\n", encoding="utf-8")
        written.append(DOCS / VALUES)
    return written


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
