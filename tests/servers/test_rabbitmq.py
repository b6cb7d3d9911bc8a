"""Tests of the private RabbitMQ."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.servers.program import REPOSITORY, is_running, listening_addresses, with_variable
from tests.servers.rabbitmq import RabbitMQ
from tests.waiting import eventually

pytestmark = [
    pytest.mark.rabbitmq,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_listens_on_loopback_only(rabbitmq: RabbitMQ) -> None:
    addresses = listening_addresses(with_variable("HOME", str(rabbitmq._server.directory)))
    assert ("127.0.0.1", urlsplit(rabbitmq.url).port) in addresses
    assert rabbitmq._epmd_address in addresses
    assert {host for host, _ in addresses} <= {"127.0.0.1", "::1"}


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
