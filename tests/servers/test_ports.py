"""Tests of port reservation, with and without a server that listens."""

from __future__ import annotations

import socket
import sys

import pytest

from tests.servers import program
from tests.servers.program import Ports, ServerError
from tests.servers.redis_server import RedisServer

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux only")


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> int:
    """Restricts the range of ports to one free port, which it returns."""
    # A range that no other test uses.
    monkeypatch.setattr(program, "_PORTS", range(19_000, 20_000))
    with Ports(1) as ports:
        (port,) = ports.numbers
    monkeypatch.setattr(program, "_PORTS", range(port, port + 1))
    return port


@linux_only
def test_a_reserved_port_is_not_assigned_again(only: int) -> None:
    with Ports(1) as ports:
        assert ports.numbers == [only]
        with pytest.raises(ServerError, match="No free port"):
            Ports(1)
    with Ports(1) as ports:
        assert ports.numbers == [only]


@linux_only
def test_a_port_stays_reserved_while_its_server_is_down(only: int) -> None:
    with RedisServer.start(config={}) as server:
        assert server.port == only
        server.kill()
        with pytest.raises(ServerError, match="No free port"):
            Ports(1)
        server.restart()
        assert server.client().ping()


def test_a_port_whose_cluster_bus_port_is_in_use_is_not_assigned(only: int) -> None:
    bus = socket.create_server(("127.0.0.1", only + 10_000))
    with bus, pytest.raises(ServerError, match="No free port"):
        Ports(1)
