"""Tests of the private RabbitMQ."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kombu.connection import Connection
from kombu.simple import SimpleQueue

from tests.faults.proxy import Proxy
from tests.servers.program import REPOSITORY, is_running, listening_addresses, with_variable
from tests.servers.rabbitmq import RabbitMQ, RabbitMQError
from tests.waiting import eventually

pytestmark = pytest.mark.exhaustive

needs_rabbitmq = pytest.mark.rabbitmq
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def broker(rabbitmq: RabbitMQ) -> RabbitMQ:
    return rabbitmq


def connect(broker: RabbitMQ) -> Connection:
    """Returns a connection that waits for publisher confirms."""
    return Connection(broker.url, transport_options={"confirm_publish": True})


def queue(connection: Connection, name: str) -> SimpleQueue:
    """Returns a durable queue, whose messages are persistent."""
    queue: SimpleQueue = connection.SimpleQueue(name)
    return queue


def port_of(broker: RabbitMQ) -> int:
    port = urlsplit(broker.url).port
    assert port is not None
    return port


def processes_of(broker: RabbitMQ) -> list[int]:
    """Returns the ids of the broker, its name service and Erlang's helper processes."""
    return with_variable("HOME", str(broker._server.directory))


@needs_rabbitmq
def test_a_proxy_works_in_front_of_it(broker: RabbitMQ) -> None:
    with Proxy(broker.url) as proxy:
        with Connection(proxy.url, transport_options={"confirm_publish": True}) as connection:
            messages = queue(connection, "by proxy")
            messages.put("first")
            proxy.lose_reply(to="second")
            with pytest.raises(connection.connection_errors):
                messages.put("second")
        assert proxy.pending == 0

        proxy.refuse()
        with pytest.raises(ConnectionRefusedError), Connection(proxy.url) as connection:
            connection.connect()
        proxy.heal()

        with Connection(proxy.url) as connection:
            messages = queue(connection, "by proxy")
            for expected in ("first", "second"):
                message = messages.get(timeout=10)
                assert message.payload == expected
                message.ack()


@needs_rabbitmq
@needs_proc
def test_listens_on_loopback_only(broker: RabbitMQ) -> None:
    addresses = listening_addresses(processes_of(broker))
    assert ("127.0.0.1", port_of(broker)) in addresses
    assert broker._epmd_address in addresses
    assert {host for host, _ in addresses} <= {"127.0.0.1", "::1"}


@needs_rabbitmq
@pytest.mark.slow
@pytest.mark.parametrize("crash", [True, False], ids=["killed", "in order"])
def test_restart_keeps_the_url_and_durable_messages(broker: RabbitMQ, crash: bool) -> None:
    url = broker.url
    with connect(broker) as connection:
        messages = queue(connection, "durable")
        messages.put("kept")
        if crash:
            broker.kill()
            with pytest.raises(connection.connection_errors):
                connection.drain_events(timeout=10)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port_of(broker)))
            with pytest.raises(RabbitMQError, match="not closed: .*unable"):
                broker.close_connections()
        broker.restart()

    assert broker.url == url
    with connect(broker) as connection:
        message = queue(connection, "durable").get(timeout=10)
        assert message.payload == "kept"
        message.ack()


START_AND_WAIT = """
from tests.servers.rabbitmq import RabbitMQ
broker = RabbitMQ.start()
print(broker._environment["HOME"], broker._server.pid, broker._epmd.pid, flush=True)
input()
"""


@needs_rabbitmq
@needs_proc
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
