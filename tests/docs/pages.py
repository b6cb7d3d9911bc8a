"""The pages of the documentation, and their parts."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "celery_idempotent"
PAGES = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
README = ROOT / "README.md"
#: A test with this mark runs for each page.
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    """Returns the page without code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's titles, as GitHub derives them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


#: A file that a page quotes, and how the first line begins, and the one after the last.
QUOTE = re.compile(
    r"^```{literalinclude} (\S+)\n:language: (\w+)\n"
    r'(?::start-at: "(.+)"\n)?(?::end-before: "(.+)"\n)?```$',
    flags=re.M,
)


def full_text(page: Path) -> str:
    """Returns the page, with the files that it quotes as code blocks."""

    def code(match: re.Match[str]) -> str:
        text = "\n" + (page.parent / match[1]).read_text("utf-8")
        start = text.index(f"\n{match[3]}") if match[3] else 0
        end = text.index(f"\n{match[4]}", start) if match[4] else -1
        return f"```{match[2]}{text[start:end].rstrip()}\n```"

    return QUOTE.sub(code, page.read_text("utf-8"))


def section(text: str, title: str) -> str:
    """Returns the part of a page below this title, up to the next one of its level or above."""
    found = re.finditer(r"^```.*?^```$|^(#+) ([^\n]+)$", text, flags=re.S | re.M)
    titles = [match for match in found if match[1]]
    (first,) = [match for match in titles if match[2] == title]
    after = [m for m in titles if m.start() > first.start() and len(m[1]) <= len(first[1])]
    return text[first.end() : after[0].start() if after else None]


def python_blocks(page: Path, title: str = "") -> list[str]:
    """Returns the Python blocks of a page or of its section, those in lists included."""
    text = full_text(page)
    found = re.findall(
        r"^( *)```python\n(.*?)^\1```$", section(text, title) if title else text, flags=re.S | re.M
    )
    return [textwrap.dedent(block) for _, block in found]


def block_with(page: Path, text: str) -> str:
    """Returns the only Python block of the page that contains this text."""
    (block,) = [block for block in python_blocks(page) if text in block]
    return block


#: Parts that differ from run to run, and what stands for them.
_VARIABLE = (
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", r"[0-9a-f-]{36}"),
    (r"(?<=:)[\w-]{22}\b", r"[\w-]{22}"),
    (r"(?:in \d+ \w+(?: \d+ \w+)?|\d+ \w+(?: \d+ \w+)? ago)\b", r"[\w ]+"),
    (r"\d+ m?s\b", r"(?:[\d.]+|a) \w+"),
    (r"\bcelery@\w+", r"celery@[\w.-]+"),
    (r"\d+", r"\d+"),
    ("…", ".*"),
    (r"\s+", r"\s+"),
)


def blocks(text: str, language: str) -> list[str]:
    """Returns the code blocks of a page in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.S | re.M)


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Returns the commands of a console block, each with the lines of its output."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        else:
            found[-1][1].append(line)
    return found


def missing_lines(printed: list[str], output: str) -> list[str]:
    """Returns the printed lines that `output` does not have, in their order.

    Ids, numbers and times may differ; a line of the output may have more at its beginning and end.
    """
    lines = iter(output.splitlines())
    return [line for line in printed if not any(_pattern(line).search(each) for each in lines)]


def _pattern(line: str) -> re.Pattern[str]:
    variable = "|".join(f"({pattern})" for pattern, _ in _VARIABLE)
    parts, position, line = [], 0, line.strip()
    for match in re.finditer(variable, line):
        parts += re.escape(line[position : match.start()]), _VARIABLE[match.lastindex - 1][1]
        position = match.end()
    return re.compile("".join([*parts, re.escape(line[position:])]))
