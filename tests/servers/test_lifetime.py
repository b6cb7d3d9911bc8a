"""A server of a test ends with its owner: those of this project, and the private one of users."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import exhaustive_except
from tests.servers.program import REPOSITORY, is_running
from tests.waiting import eventually

STARTS = {
    "of users": "from celery_idempotent.testing.server import RedisServer; server = RedisServer()",
    "of this project": (
        "from tests.servers.redis_server import RedisServer; server = RedisServer.start()"
    ),
}
#: What the owner does after its start.
ENDS = {
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "returns": "",
    "exits": "raise SystemExit(3)",
    "drops it": "import gc; del server; gc.collect(); input()",
}
START = '{start}\nprint(server.client().info("server")["process_id"], flush=True)\n{then}'
STOP_IN_A_FORKED_CHILD = """
import os
if os.fork() == 0:
    server.stop()
    os._exit(0)
os.wait()
assert os.path.exists(server.client().config_get("dir")["dir"])
server.stop()
"""


def owner_of_a_server(start: str, then: str, directory: Path) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", START.format(start=STARTS[start], then=then)]
    environment = {**os.environ, "TMPDIR": str(directory)}  # a killed owner leaves files there
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    owner = subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, **streams)
    return owner, int(owner.stdout.readline())


@pytest.mark.parametrize("end", exhaustive_except(ENDS, "is killed"))
@pytest.mark.parametrize("start", exhaustive_except(STARTS, "of users"))
def test_ends_when_its_owner(start: str, end: str, tmp_path: Path) -> None:
    owner, server_pid = owner_of_a_server(start, ENDS[end], tmp_path)
    with owner:
        eventually(lambda: not is_running(server_pid))
    assert end == "is killed" or not list(tmp_path.iterdir())


@pytest.mark.parametrize("start", exhaustive_except(STARTS, "of users"))
def test_a_forked_child_of_the_owner_does_not_stop_the_server(start: str, tmp_path: Path) -> None:
    owner, _ = owner_of_a_server(start, STOP_IN_A_FORKED_CHILD, tmp_path)
    with owner:
        assert owner.wait() == 0
