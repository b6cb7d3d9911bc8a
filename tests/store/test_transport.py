"""Which connections ServerTransport reuses."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis.exceptions import NoScriptError

from celery_idempotent.core.store import run_sync
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.transport.server import ServerTransport
from tests.servers.redis_server import RedisServer


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer.start(config={"databases": "2"}) as server:
        yield server


@pytest.fixture
def transport(server: RedisServer) -> ServerTransport:
    return ServerTransport(StoreConfig(url=server.url), timeout=2)


def send(transport: ServerTransport, *command: Any) -> Any:
    (reply,) = run_sync(transport.send(command))
    return reply


def connection_of(transport: ServerTransport) -> int:
    answer: int = send(transport, "CLIENT", "ID")
    return answer


def test_an_error_of_the_server_keeps_the_connection(transport: ServerTransport) -> None:
    before = connection_of(transport)

    assert isinstance(send(transport, "EVALSHA", "0" * 40, 0), NoScriptError)
    assert connection_of(transport) == before


def test_all_are_replaced_after_a_restart(transport: ServerTransport, server: RedisServer) -> None:
    together = threading.Barrier(5)

    def wait(_: int) -> None:
        together.wait()
        send(transport, "BLPOP", "nothing", "0.05")

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(wait, range(5)))
    server.restart()

    assert send(transport, "ECHO", "still there") == b"still there"


def test_connections_may_be_lost_often(transport: ServerTransport, server: RedisServer) -> None:
    # A pool of redis-py 8 is limited to a hundred connections by default.
    with server.client() as client:
        for _ in range(120):
            client.client_kill_filter(_id=connection_of(transport))

    assert send(transport, "ECHO", "still there") == b"still there"


def test_the_reply_of_an_interrupted_command_is_not_read_by_another(
    transport: ServerTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection_of(transport)
    ((connection, _),) = transport._pool.get().idle

    def interrupt(**_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(connection, "read_response", interrupt)
        with pytest.raises(KeyboardInterrupt):
            send(transport, "ECHO", "late")

    assert send(transport, "ECHO", "mine") == b"mine"


def test_a_forked_process_opens_its_own_connections(transport: ServerTransport) -> None:
    before = connection_of(transport)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(connection_of(transport)).encode())
        os._exit(0)
    os.waitpid(child, 0)

    assert int(os.read(reader, 20)) != before
    assert connection_of(transport) == before
