"""Ports are one's own: while nobody listens, and while one's own server does."""

from __future__ import annotations

import errno
import socket
import sys

import pytest

from celery_idempotent.testing import ports as ports_module
from celery_idempotent.testing.ports import Ports
from celery_idempotent.testing.process import ServerError
from celery_idempotent.testing.server import RedisServer

held = pytest.mark.skipif(sys.platform != "linux", reason="ports are held on Linux alone")


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> int:
    """The one port that there is to be had."""
    # Where no other test looks for one.
    monkeypatch.setattr(ports_module, "_PORTS", range(19_000, 20_000))
    with Ports(1) as ports:
        (port,) = ports.numbers
    monkeypatch.setattr(ports_module, "_PORTS", range(port, port + 1))
    return port


@held
def test_nobody_else_is_given_a_port_that_is_held(only: int) -> None:
    with Ports(1) as ports:
        assert ports.numbers == [only]
        with pytest.raises(ServerError, match="No free port"):
            Ports(1)
    with Ports(1) as ports:
        assert ports.numbers == [only]


@held
def test_nor_while_the_server_there_is_down(only: int) -> None:
    with RedisServer.start(config={}) as server:
        assert server.port == only
        server.kill()
        with pytest.raises(ServerError, match="No free port"):
            Ports(1)
        server.restart()
        assert server.client().ping()


def test_a_port_that_somebody_listens_on_is_not_had(only: int) -> None:
    with socket.create_server(("127.0.0.1", only)):
        for taker in (lambda: Ports(1), lambda: RedisServer.start(config={})):
            with pytest.raises(ServerError, match="No free port"):
                taker()


def test_the_port_of_a_cluster_bus_is_looked_at_too(only: int) -> None:
    bus = socket.create_server(("127.0.0.1", only + 10_000))
    with bus, pytest.raises(ServerError, match="No free port"):
        Ports(1)


def test_nobody_answers_on_a_port_that_is_held(only: int) -> None:
    with Ports(1), socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", only)) == errno.ECONNREFUSED


def test_giving_back_twice_is_once(only: int) -> None:
    ports = Ports(1)
    ports.stop()
    with Ports(1):
        ports.stop()
        if sys.platform == "linux":
            with pytest.raises(ServerError):
                Ports(1)
