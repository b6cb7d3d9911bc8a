"""Which connections ServerTransport reuses."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
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
    return transport_for(server.url)


def transport_for(url: str) -> ServerTransport:
    return ServerTransport(StoreConfig(url=url), timeout=2)


def send(transport: ServerTransport, *command: Any) -> Any:
    (reply,) = run_sync(transport.send(command))
    return reply


def connection_of(transport: ServerTransport) -> int:
    answer: int = send(transport, "CLIENT", "ID")
    return answer


def test_one_connection_is_used_again_and_again(transport: ServerTransport) -> None:
    assert connection_of(transport) == connection_of(transport)


def test_an_error_of_the_server_keeps_the_connection(transport: ServerTransport) -> None:
    before = connection_of(transport)

    assert isinstance(send(transport, "EVALSHA", "0" * 40, 0), NoScriptError)
    assert connection_of(transport) == before


def test_a_connection_that_the_server_closed_is_replaced(
    transport: ServerTransport, server: RedisServer
) -> None:
    before = connection_of(transport)
    with server.client() as client:
        client.client_kill_filter(_id=before)

    assert connection_of(transport) != before


def test_all_connections_are_replaced_after_a_restart(
    transport: ServerTransport, server: RedisServer
) -> None:
    together = threading.Barrier(5)

    def wait() -> None:
        together.wait()
        send(transport, "BLPOP", "nothing", "0.05")

    threads = [threading.Thread(target=wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.restart()

    assert send(transport, "ECHO", "still there") == b"still there"


def test_a_connection_may_be_lost_any_number_of_times(
    transport: ServerTransport, server: RedisServer
) -> None:
    # A pool of redis-py 8 is limited to a hundred connections by default.
    with server.client() as client:
        for _ in range(120):
            client.client_kill_filter(_id=connection_of(transport))

    assert send(transport, "ECHO", "still there") == b"still there"


def test_any_number_of_threads_can_send_concurrently(transport: ServerTransport) -> None:
    callers = 150
    together = threading.Barrier(callers)

    def wait(_: int) -> Any:
        together.wait()
        return send(transport, "BLPOP", "nothing", "0.2")

    with ThreadPoolExecutor(callers) as pool:
        assert list(pool.map(wait, range(callers))) == [None] * callers


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


def test_an_unreachable_server_is_an_error_after_all_resends(server: RedisServer) -> None:
    transport = transport_for(server.url.replace(server.url.split(":")[2].split("/")[0], "1"))

    with pytest.raises(RedisConnectionError):
        send(transport, "PING")
