"""A server of a test ends with its owner: those of this project, and the private one of users."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import exhaustive_except
from tests.servers.program import REPOSITORY, is_running
from tests.servers.redis_server import find_servers
from tests.waiting import eventually

PRIVATE = "from celery_idempotent.testing.server import RedisServer; server = RedisServer()"
#: What starts each kind of server.
KINDS = [
    f"from tests.servers.redis_server import RedisServer; server = RedisServer.start({kind!r})"
    for kind in find_servers()
]
BOTH = PRIVATE, KINDS[0]

START_AND_WAIT = """
{start}
print(server.client().info("server")["process_id"], flush=True)
{then}
"""


def owner_of_a_server(start: str, then: str, directory: Path) -> tuple[subprocess.Popen[str], int]:
    owner = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT.format(start=start, then=then)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(directory)},  # a killed owner leaves files there
    )
    return owner, int(owner.stdout.readline())


@pytest.mark.parametrize("start", exhaustive_except([PRIVATE, *KINDS], *BOTH))
def test_ends_when_its_owner_is_killed(start: str, tmp_path: Path) -> None:
    if start != PRIVATE and sys.platform != "linux":
        pytest.skip("needs PR_SET_PDEATHSIG")
    owner, server_pid = owner_of_a_server(start, "input()", tmp_path)
    with owner:
        assert is_running(server_pid)
        owner.kill()
    assert owner.returncode == -signal.SIGKILL
    eventually(lambda: not is_running(server_pid))


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", BOTH)
@pytest.mark.parametrize(
    "then", ["", "raise SystemExit(3)", "import gc; del server; gc.collect(); input()"]
)
def test_ends_when_its_owner_exits_or_drops_it(start: str, then: str, tmp_path: Path) -> None:
    owner, server_pid = owner_of_a_server(start, then, tmp_path)
    with owner:
        eventually(lambda: not is_running(server_pid))
    assert not list(tmp_path.iterdir())


STOP_IN_A_FORKED_CHILD = """
import os
if os.fork() == 0:
    server.stop()
    os._exit(0)
os.wait()
assert os.path.exists(server.client().config_get("dir")["dir"])
server.stop()
"""


@pytest.mark.parametrize("start", BOTH)
def test_a_forked_child_of_the_owner_does_not_stop_the_server(start: str, tmp_path: Path) -> None:
    owner, _ = owner_of_a_server(start, STOP_IN_A_FORKED_CHILD, tmp_path)
    with owner:
        assert owner.wait() == 0
