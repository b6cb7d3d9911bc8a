"""Tests of the private RabbitMQ."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.program import REPOSITORY, is_running, with_variable
from tests.waiting import eventually

pytestmark = [
    pytest.mark.rabbitmq,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


START_AND_WAIT = """
from tests.servers.rabbitmq import RabbitMQ
broker = RabbitMQ.start()
print(broker._environment["HOME"], broker._server.pid, broker._epmd.pid, flush=True)
input()
"""


@pytest.mark.slow
def test_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed owner leaves files there
    )
    with owner:
        directory, *pids = owner.stdout.readline().split()
        assert all(is_running(int(pid)) for pid in pids)
        owner.kill()
    assert owner.returncode == -signal.SIGKILL
    eventually(lambda: not any(is_running(int(pid)) for pid in pids))
    eventually(lambda: not with_variable("HOME", directory))
