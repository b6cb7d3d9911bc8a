"""The Python blocks of all pages pass a type check, and name only options that exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from celery_idempotent.settings import APP_OPTIONS, OPTIONS
from tests.docs.pages import PAGES, ROOT, each_page, python_blocks

#: What else begins so: attributes of a task, fixtures of the pytest plugin, and its ini option.
OTHER_NAMES = {
    *("idempotency_record", "idempotency_forget", "idempotency_key_of"),
    *("idempotency_server", "idempotency_redis_url", "idempotency_metadata"),
    *("idempotency_middleware", "idempotency_options"),
}

#: A name that a block does not define is Any: blocks are parts of a program.
CONFIGURATION = """\
[mypy]
check_untyped_defs = True
ignore_missing_imports = True
follow_imports = silent
disable_error_code = import-untyped, method-assign, name-defined, no-redef, used-before-def
"""
HEAD = """\
from celery_idempotent import Idempotency

idem: Idempotency
"""


@each_page
def test_options_in_python_blocks_exist(page: Path) -> None:
    for block in python_blocks(page):
        names = re.findall(r"\b(?:CELERY_)?(idempotency_\w+)", block, flags=re.I)
        assert {name.lower() for name in names} <= {*OPTIONS, *APP_OPTIONS, *OTHER_NAMES}


@each_page
def test_longer_examples_are_quoted_files(page: Path) -> None:
    found = re.findall(r"^( *)```python\n(.*?)^\1```$", page.read_text("utf-8"), re.S | re.M)
    assert [block for _, block in found if len(block.splitlines()) > 10] == []


def test_quoted_files_run() -> None:
    """Those of other libraries only if these are installed; `test_tutorial` runs the tutorial."""
    code = """if True:
        import runpy, sys
        for path in sys.argv[1:]:
            try:
                runpy.run_path(path)
            except ModuleNotFoundError as error:
                if error.name not in ("celery_once", "celery_singleton"):
                    raise
    """
    files = sorted((ROOT / "docs/examples").glob("*.py"))
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, files)]
    subprocess.run(command, cwd=ROOT, check=True)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_python_blocks_pass_a_type_check(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("mypy is not installed: pip install -e . --group dev")
        pytest.skip("mypy is not installed")
    lines, origins = HEAD.splitlines(), {}
    for page in PAGES:
        for number, block in enumerate(python_blocks(page), 1):
            # Blocks contain top-level await and return, and decorators without a function.
            body = textwrap.indent(block + "def last(): ...\n", "    ").splitlines()
            origins[len(lines) + 1] = f"{page.relative_to(ROOT)}, Python block {number}"
            lines += [f"async def block_{len(origins)}():", *body]
    (tmp_path / "blocks.py").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(CONFIGURATION, encoding="utf-8")

    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary"]
    command += ["--cache-dir", str(ROOT / ".mypy_cache/docs"), "blocks.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    errors = [
        f"{origins[max(start for start in origins if start <= int(line))]}: {error}"
        for line, error in re.findall(r"^blocks\.py:(\d+): (.*)$", run.stdout, flags=re.M)
    ]
    assert errors == []
    assert run.returncode == 0, run.stdout + run.stderr
