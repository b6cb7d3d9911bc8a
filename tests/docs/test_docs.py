"""Links, paths, code blocks, options and signals in the documentation are correct."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent import TASK_ID
from celery_idempotent.settings import APP_OPTIONS, OPTIONS, PREFIX, Settings
from tests.docs.pages import README, ROOT, anchors, each_page, prose, python_blocks, section
from tests.unit.conftest import celery, settings_of

#: Pages that name files of this repository in backticks.
PAGES_WITH_PATHS = [ROOT / "docs/contributing/architecture.md", ROOT / "CONTRIBUTING.md"]


@each_page
def test_links_lead_to_existing_files_and_titles(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES_WITH_PATHS, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    names = re.findall(r"`([\w./]+(?:/|\.(?:py|lua|md|txt|toml)))`", prose(page))
    folders = (ROOT, ROOT / "celery_idempotent")
    missing = [n for n in names if not any((folder / n).exists() for folder in folders)]
    assert names
    assert not missing


@each_page
def test_python_blocks_are_valid_and_their_imports_of_the_package_work(page: Path) -> None:
    for block in python_blocks(page):
        # Blocks contain top-level await and return, and decorators without a function.
        body = textwrap.indent(block + "\ndef last(): ...\n", "    ")
        for node in ast.walk(ast.parse(f"async def block():\n{body}")):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("celery_idem"):
                module = importlib.import_module(str(node.module))
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []


@each_page
def test_diagrams_have_no_semicolon(page: Path) -> None:
    # Mermaid ends a line there, and then draws nothing.
    for diagram in re.findall(r"^```mermaid\n(.*?)^```$", page.read_text("utf-8"), re.S | re.M):
        assert ";" not in diagram


def documented_options() -> dict[str, str]:
    """Returns the options in the table of the connection, with their defaults."""
    text = prose(ROOT / "docs/redis-configuration.md")
    rows = re.findall(r"^\| `(idempotency_\w+)` \| `([^`]+)` \|", text, flags=re.M)
    return dict(rows)


def test_every_option_is_documented_and_exists() -> None:
    page = prose(ROOT / "docs/reference/options.md")
    described = re.findall(r"^### `(idempotency_\w+)`$", page, flags=re.M)
    assert sorted(described) == sorted({*OPTIONS, *APP_OPTIONS})
    assert documented_options().keys() <= set(described)


def test_documented_defaults_are_those_of_the_settings() -> None:
    documented = documented_options()
    assert documented
    for option in fields(Settings):
        value = documented.get(f"idempotency_{option.name}")
        if value is not None:
            assert ast.literal_eval(value) == option.default, option.name


@pytest.mark.parametrize(
    ("page", "title", "number", "others"),
    [
        (README, "Choosing a mode", 4, {}),
        (ROOT / "docs/modes.md", "One at a time", 3, {"idempotency_until": "finished"}),
    ],
)
def test_modes_are_options(page: Path, title: str, number: int, others: dict[str, Any]) -> None:
    modes = re.findall(r"^\| .* \| `(idempotency_[^`]+)`", section(prose(page), title), re.M)
    assert len(modes) == number
    for mode in modes:
        options = others | eval(f"dict({mode})", {"TASK_ID": TASK_ID})
        chosen = settings_of(celery(), **options)
        assert {name: getattr(chosen, name.removeprefix(PREFIX)) for name in options} == options


def test_the_site_has_each_page_once() -> None:
    index = (ROOT / "docs/index.md").read_text("utf-8")
    trees = re.findall(r"{toctree}(.*?)```", index, re.S)
    entries = re.findall(r"^([\w/-]+)$", "".join(trees), re.M)

    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert sorted([*entries, "index"]) == sorted(p.with_suffix("").as_posix() for p in pages)


def test_no_page_and_no_part_is_too_long() -> None:
    """Counts the words with a letter or a digit; no page that is generated, or read by a test."""
    words = {
        page: sum(any(map(str.isalnum, word)) for word in text.split())
        for page in (README, *(ROOT / "docs").rglob("*.md"))
        if not re.search("<!-- (Generated|Read) by", text := page.read_text("utf-8"))
    }
    contributors = ROOT / "docs/contributing"

    assert [page.name for page, count in words.items() if count > 1800] == []
    assert sum(count for page, count in words.items() if contributors in page.parents) <= 8_000
    assert sum(count for page, count in words.items() if contributors not in page.parents) <= 20_000


def test_pages_that_the_code_names_exist() -> None:
    folders = ("celery_idempotent", "lua", "labs", "tests", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.*")]
    named = re.compile(r"(?<![\w/])docs/([\w/.-]+?\.(?:md|yml|json|py))(?:#([\w-]+))?\b")
    site = re.compile(r"readthedocs\.io/en/stable/([\w/-]+)\.html(?:#([\w-]+))?")
    found, missing = 0, []
    for file in [ROOT / "Makefile", *files]:
        if file.suffix not in (".py", ".lua", ".html", "") or not file.is_file():
            continue
        text = file.read_text("utf-8")
        pages = [(f"{path}.md", anchor) for path, anchor in site.findall(text)]
        for path, anchor in named.findall(text) + pages:
            found += 1
            page = ROOT / "docs" / path
            if not page.exists() or (anchor and anchor not in anchors(page)):
                missing.append(f"{file.relative_to(ROOT)}: {path}#{anchor}")
    assert found > 20
    assert missing == []


def test_tests_that_the_page_of_security_names_exist() -> None:
    page = ROOT / "docs/security.md"
    links = re.findall(r"\[(test_\w+)\]\(([^)]+)\)", prose(page))

    assert len(links) > 15
    for name, path in links:
        text = (page.parent / path).read_text("utf-8")
        assert re.search(rf"^ *def {name}\(", text, flags=re.M), name
