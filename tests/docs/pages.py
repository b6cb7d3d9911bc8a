"""The pages of the documentation, and their parts."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "celery_idempotent"
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / ".github/CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
README = ROOT / "README.md"


def prose(page: Path) -> str:
    """Returns the page without code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's titles, as GitHub derives them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def python_blocks(page: Path) -> list[str]:
    """Returns the Python blocks of a page, those in lists included."""
    found = re.findall(r"^( *)```python\n(.*?)^\1```$", page.read_text("utf-8"), flags=re.S | re.M)
    return [textwrap.dedent(block) for _, block in found]


def block_with(page: Path, text: str) -> str:
    """Returns the only Python block of the page that contains this text."""
    (block,) = [block for block in python_blocks(page) if text in block]
    return block
