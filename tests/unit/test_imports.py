"""What ``import celery_idempotent`` loads: it is a part of the start of every process."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
import zipfile
from pathlib import Path

import pytest

from tests.servers.redis_server import RedisServer

ROOT = Path(__file__).parents[2]

#: Lines of code, without comments and docstrings: those that a task with default options loads, in
#: so many files, and those of core/. These numbers may fall, and not rise: who adds takes away, or
#: puts it where a task loads it if its options need it. What is worth more lines than this raises
#: the number in a commit with the reason.
LOADED_LINES, LOADED_FILES, CORE_LINES = 5_885, 57, 8_215

_LOAD_A_TASK = """
from celery import Celery
from celery_idempotent import IdempotentTask
app = Celery(broker="memory://", backend="redis://")
@app.task(base=IdempotentTask)
def f(x): ...
f.idempotency_configuration
"""

#: Runs in a process of its own; prints the modules that only this package loads.
_PRINT_IMPORTED = """
import sys
import celery.app.amqp, celery.app.log, celery.app.task, celery.canvas, celery.result
import celery.backends.redis, kombu.transport.redis
before = set(sys.modules)
{statement}
print(*sorted(set(sys.modules) - before))
"""

#: Each is needed by a part that imports it when it is used.
FORBIDDEN = (
    *("asyncpg", "cryptography.fernet", "django", "prometheus_client", "sentry_sdk", "sqlalchemy"),
    *("humanize", "jinja2", "rich", "starlette", "uvicorn"),
    *(f"celery_idempotent.{name}" for name in ("contrib", "dashboard", "extensions", "functions")),
    *(f"celery_idempotent.{name}" for name in ("redelivery", "sql", "testing", "waking")),
    *(f"celery_idempotent.operations.{name}" for name in ("cli", "doctor", "records")),
)


def imported_by(statement: str) -> list[str]:
    code = _PRINT_IMPORTED.format(statement=statement)
    return subprocess.check_output([sys.executable, "-c", code], text=True).split()


@pytest.fixture(scope="module")
def imported() -> list[str]:
    return imported_by(_LOAD_A_TASK)


def test_tasks_do_without(imported: list[str]) -> None:
    loaded = {each for each in imported for name in FORBIDDEN if f"{each}.".startswith(f"{name}.")}
    assert loaded == set()


def test_tasks_load_few_modules_of_others() -> None:
    imported = imported_by("from celery_idempotent import IdempotentTask")
    others = {name.partition(".")[0] for name in imported} - {"celery_idempotent"}

    assert others <= {"mmap", "ctypes", "_ctypes", "difflib", "gc", "importlib"}


def test_tasks_load_little_code(imported: list[str]) -> None:
    names = [name.replace(".", "/") for name in imported if name.startswith("celery_idempotent")]
    paths = [ROOT / name for each in names for name in (f"{each}.py", f"{each}/__init__.py")]
    check_size([path for path in paths if path.exists()], LOADED_LINES, LOADED_FILES)


def test_the_core_does_not_grow() -> None:
    check_size([*(ROOT / "celery_idempotent/core").rglob("*.py")], CORE_LINES)


def check_size(paths: list[Path], most_lines: int, most_files: int = 1000) -> None:
    """Fails with the files from which to take away first."""
    lines = {path.relative_to(ROOT): code_lines(path) for path in paths}
    total, files = sum(lines.values()), sorted(lines, key=lambda path: -lines[path])
    if total > most_lines or len(files) > most_files:
        largest = ", ".join(f"{path} {lines[path]}" for path in files[:10])
        pytest.fail(
            f"{total} lines in {len(files)} files, and {most_lines} in {most_files} are allowed: "
            f"see the comment above these numbers; the largest: {largest}",
            pytrace=False,
        )


def code_lines(path: Path) -> int:
    """Returns the number of lines of code."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
            if first is not None:
                docstrings |= {*range(first.lineno, (first.end_lineno or 0) + 1)}
    lines: set[int] = set()
    quiet = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*quiet, tokenize.ENDMARKER):
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - docstrings)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import celery_idempotent

    with pytest.raises(AttributeError, match="has no attribute 'nonesuch'"):
        celery_idempotent.nonesuch  # noqa: B018


#: Windows lacks these; what this package depends on handles that itself, so it is imported first.
_AS_ON_WINDOWS = """
import os, signal, sys
import asyncio, subprocess, billiard.pool
import celery.bin.celery, celery.worker.worker, celery.worker.consumer
import celery.concurrency.solo, celery.concurrency.thread, celery.contrib.testing.worker
import celery.backends.redis, kombu.transport.memory, kombu.transport.redis, redis.asyncio
for name in ("fork", "register_at_fork", "getuid", "geteuid", "getgid", "killpg", "setsid"):
    delattr(os, name)
for name in ("KILL", "HUP", "USR1", "USR2", "ALRM", "CHLD", "QUIT"):
    delattr(signal, f"SIG{name}")
for name in ("alarm", "setitimer", "pthread_sigmask", "ITIMER_REAL"):
    delattr(signal, name)
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
"""


def test_tasks_run_without_what_windows_lacks(server: RedisServer) -> None:
    url = server.url
    code = f"""{_AS_ON_WINDOWS}
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery_idempotent import IdempotentTask
import celery_idempotent.redelivery.bootstep, celery_idempotent.dashboard
app = Celery(broker={url!r}, backend={url!r})
runs = []
@app.task(base=IdempotentTask, idempotency_key="{{n}}", name="shop.charge")
def charge(n):
    runs.append(n)
    return n
app.loader.import_default_modules()
for pool in ("solo", "threads"):
    with start_worker(app, pool=pool, perform_ping_check=False):
        print(*(charge.delay(pool).get(timeout=20) for _ in range(2)))
print(*runs)
"""
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.split() == ["solo", "solo", "threads", "threads", "solo", "threads"]


def test_the_package_works_inside_a_zip_file(tmp_path: Path) -> None:
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for folder, name in (("celery_idempotent", ""), ("lua", "celery_idempotent/")):
            for path in (ROOT / folder).rglob("*"):
                file.write(path, name + str(path.relative_to(ROOT)))
    code = """
import celery_idempotent.core.store.scripts as scripts
from celery import Celery
from starlette.testclient import TestClient
from celery_idempotent.dashboard import asgi
web = TestClient(asgi(Celery(), auth="u:p"), "http://localhost", raise_server_exceptions=False)
paths = "/absent", "/static/dashboard.css", "/static/icon.svg"
replies = [web.get(path, auth=("u", "p")) for path in paths]
print(".zip" in scripts.__file__, scripts.load("begin").name, [r.status_code for r in replies])
"""
    printed = subprocess.check_output(
        [sys.executable, "-c", code], text=True, env={"PYTHONPATH": str(archive)}, cwd=tmp_path
    )
    assert printed == "True begin [404, 200, 200]\n"
