"""The tutorial works as printed: its files, its commands in three terminals, and their output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, commands, full_text, missing_lines, python_blocks
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually

pytestmark = pytest.mark.exhaustive

PAGE = ROOT / "docs/tutorial.md"
TEXT = full_text(PAGE)

#: Programs of the environment that the tutorial is followed in; `make rehearsal` sets another one.
BIN = os.environ.get("TUTORIAL_BIN", Path(sys.executable).parent)

Terminal = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The reader's directory, with the files of the tutorial."""
    names = re.findall(r"`(\w+\.py)`:\n\n```python", TEXT)
    assert names == ["shop.py", "pay.py"]
    for name, code in zip(names, python_blocks(PAGE), strict=True):
        (tmp_path / name).write_text(code, encoding="utf-8")
    return tmp_path


@pytest.fixture
def terminal(directory: Path) -> Iterator[Terminal]:
    """Starts a command in the directory; its output goes to a file of the process's name."""
    processes = []
    with RedisServer.start(config={}) as server:
        environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
        # Celery prefers these to the URLs in the code, which are those of the reader's server.
        environment |= {"CELERY_BROKER_URL": server.url, "CELERY_RESULT_BACKEND": server.url}

        def terminal(command: str) -> subprocess.Popen[str]:
            with (directory / f"{len(processes)}.log").open("w") as output:
                streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
                how = {"cwd": directory, "env": environment, "text": True, **streams}
                shell = ["bash", "-c", f"exec {command}"]
                process = subprocess.Popen(shell, start_new_session=True, **how)
            processes.append(process)
            return process

        yield terminal
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait(SOON)


@pytest.mark.worker
@pytest.mark.slow
def test_the_tutorial_works_as_printed(directory: Path, terminal: Terminal) -> None:
    install, start, pay, kill, paid, show = (commands(b) for b in blocks(TEXT, "console"))
    conflict, takeover = (block.splitlines() for block in blocks(TEXT, "text"))
    assert "pip install 'celery-idempotent[cli]'" in [command for command, _ in install]

    def output(number: int) -> str:
        return (directory / f"{number}.log").read_text("utf-8")

    def has(lines: list[str], number: int) -> None:
        eventually(lambda: not missing_lines(lines, output(number)), f"{lines}: {output(number)}")

    ((command, _),) = start
    terminal(command)
    has(["ready."], 0)

    ((command, _),) = pay
    caller = terminal(command)
    has(conflict, 0)

    ((command, _),) = kill
    printed = re.search(r"in process (\d+)", conflict[0])
    actual = re.search(r"in process (\d+)", output(0))
    assert terminal(command.replace(printed[1], actual[1])).wait(SOON) == 0
    has(takeover, 0)

    ((_, receipts),) = paid
    assert caller.wait(SOON) == 0
    has(receipts, 1)
    assert len(output(1).splitlines()) == len(receipts) == 2

    ((command, record),) = show
    assert terminal(command).wait(SOON) == 0
    has(record, 3)

    # "Try it": the receipt comes at once, and the worker charges nothing.
    ((command, _),) = pay
    assert terminal(command).wait(SOON) == 0
    has(["got the receipt for order 42"] * 2, 4)
    assert output(0).count("charging 999 for order 42") == 2
