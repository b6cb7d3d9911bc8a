"""Pages in docs/: what is measured stands between marks, what people write around them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.labs.benchmarks.report import Report

DOCS = Path(__file__).parents[3] / "docs"
#: Folder of the plots and of the raw values, in docs/.
FOLDER = "benchmarks"
FIGURES = f"{FOLDER}/figures.json"


def write(report: Report, images: Mapping[str, list[str]]) -> list[Path]:
    """Put the tables into their pages, and the raw values beside the plots; what was written."""
    pages = sorted({measure.page for measure in report.findings})
    for page in pages:
        path = DOCS / f"{page}.md"
        text = path.read_text(encoding="utf-8")
        text = between(text, "setting", report.setting)
        text = between(text, "goals", report.goals(page))
        text = between(text, "figures", report.figures(page, images))
        path.write_text(text, encoding="utf-8")
    (DOCS / FIGURES).write_text(report.json() + "\n", encoding="utf-8")
    return [*(DOCS / f"{page}.md" for page in pages), DOCS / FIGURES]


def between(text: str, name: str, content: str) -> str:
    """`text` with `content` between the marks of that name; as it is, where it has none."""
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(first)
    if not found:
        return text
    old, found, after = rest.partition(last)
    if not found:
        raise ValueError(f"{first} without {last}")
    del old
    return f"{before}{first}\n\n{content}\n\n{last}{after}"
