"""Messages and commands that the documentation names exist in the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import click
import pytest

from celery_idempotent.operations.cli import idempotency
from celery_idempotent.operations.doctor.finding import NAMES
from docs.generate_reference import error_classes
from tests.docs.pages import PACKAGE, ROOT, each_page

RUNBOOK = (ROOT / "docs/runbook.md").read_text("utf-8")


@cache
def messages() -> tuple[str, ...]:
    """Returns all texts of the package, with … for what is filled in."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[.\d]*\w", "…", node.value))
    return tuple(found)


def named_messages() -> list[str]:
    """Returns the messages in the first column of the tables: text in backticks, with spaces."""
    cells = re.findall(r"^\| ([^|]*`[^|]*) \|", RUNBOOK, flags=re.M)
    return sorted({text for cell in cells for text in re.findall(r"`([^`]+ [^`]+)`", cell)})


@pytest.mark.parametrize("message", named_messages())
def test_messages_of_the_runbook_exist(message: str) -> None:
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))), flags=re.S)
    assert [text for text in messages() if pattern.search(text)]


def test_the_guide_names_enough_messages_and_only_errors_that_exist() -> None:
    assert len(named_messages()) > 5
    assert set(re.findall(r"`(\w+Error)`", RUNBOOK)) - {"WorkerLostError"} <= set(error_classes())


def test_each_finding_is_registered_and_has_an_entry_in_the_reference() -> None:
    reference = (ROOT / "docs/reference/findings.md").read_text("utf-8")
    named = (
        r"""Finding\(\s*"([\w-]+)", |Check\([^"]*?, "([\w-]+)", Severity|"([\w-]+)", Severity"""
        r"""|"([\w-]+)", "(?:note|warning|error)\""""
    )

    def findings(file: Path) -> set[str]:
        found = re.findall(named, file.read_text("utf-8"))
        return {next(filter(None, names)) for names in found}

    files = [*(PACKAGE / "operations/doctor").glob("*.py"), *(PACKAGE / "extensions").glob("*.py")]
    every = set().union(*map(findings, files))
    assert sorted(every) == sorted(NAMES)
    described = set(re.findall(r'id="finding-([\w-]+)"', reference))
    assert described == every


@each_page
def test_commands_exist(page: Path) -> None:
    commands = re.findall(r"celery -A [\w.]+ idempotency (\w+)([^`\n|#]*)", page.read_text("utf-8"))
    for name, arguments in commands:
        command = idempotency.commands.get(name)
        assert command is not None, name
        options = [each for each in command.params if isinstance(each, click.Option)]
        known = {name for each in options for name in (*each.opts, *each.secondary_opts)}
        assert set(re.findall(r"(?<=\s)--[\w-]+", arguments)) <= known, name


@each_page
def test_extras_and_make_targets_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    extras = re.findall(r"celery-idempotent\[([\w,]+)\]", text)
    targets = re.findall(r"^(?:make|`make) ([a-z]+)", text, flags=re.M)
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")

    for extra in ",".join(extras).split(",") if extras else []:
        assert re.search(rf"^{extra} = \[", pyproject, flags=re.M), extra
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
