"""Connections that are used again, and those that must not be."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError

from celery_idempotent.store.config import StoreConfig
from celery_idempotent.store.transport.connection import connect
from celery_idempotent.store.transport.sync import SyncTransport, packed
from celery_idempotent.testing.server import RedisServer


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer.start(config={"databases": "2"}) as server:
        yield server


@pytest.fixture
def line(server: RedisServer) -> SyncTransport:
    return transport_for(server.url)


def transport_for(url: str) -> SyncTransport:
    config = StoreConfig(url=url)
    return SyncTransport(connect(config, timeout=1, retries=0), timeout=2)


def ask(line: SyncTransport, *words: Any) -> Any:
    (answer,) = line.send([packed(words)])
    return answer


def connection_of(line: SyncTransport) -> int:
    answer: int = ask(line, "CLIENT", "ID")
    return answer


def test_one_connection_is_used_again_and_again(line: SyncTransport) -> None:
    assert connection_of(line) == connection_of(line)


def test_an_error_of_the_server_keeps_the_connection(line: SyncTransport) -> None:
    before = connection_of(line)

    assert isinstance(ask(line, "EVALSHA", "0" * 40, 0), NoScriptError)
    assert connection_of(line) == before


def test_a_connection_that_the_server_closed_is_replaced(
    line: SyncTransport, server: RedisServer
) -> None:
    before = connection_of(line)
    with server.client() as client:
        client.client_kill_filter(_id=before)

    assert connection_of(line) != before


def test_so_are_all_of_them_after_a_restart(line: SyncTransport, server: RedisServer) -> None:
    together = threading.Barrier(5)

    def wait() -> None:
        together.wait()
        ask(line, "BLPOP", "nothing", "0.05")

    threads = [threading.Thread(target=wait) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.restart()

    assert ask(line, "ECHO", "still there") == b"still there"


def test_a_connection_may_be_lost_any_number_of_times(
    line: SyncTransport, server: RedisServer
) -> None:
    # redis-py 8 lets a pool make a hundred connections.
    with server.client() as client:
        for _ in range(120):
            client.client_kill_filter(_id=connection_of(line))

    assert ask(line, "ECHO", "still there") == b"still there"


def test_any_number_of_threads_may_ask_at_a_time(line: SyncTransport) -> None:
    callers = 150
    together = threading.Barrier(callers)

    def wait(_: int) -> Any:
        together.wait()
        return ask(line, "BLPOP", "nothing", "0.2")

    with ThreadPoolExecutor(callers) as pool:
        assert list(pool.map(wait, range(callers))) == [None] * callers


def test_an_interrupted_command_leaves_its_answer_to_nobody(
    line: SyncTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection_of(line)
    ((_, answers),) = line._free

    def interrupt(**_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(answers, "next", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask(line, "ECHO", "late")

    assert ask(line, "ECHO", "mine") == b"mine"


def test_a_fork_makes_connections_of_its_own(line: SyncTransport) -> None:
    before = connection_of(line)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(connection_of(line)).encode())
        os._exit(0)
    os.waitpid(child, 0)

    assert int(os.read(reader, 20)) != before
    assert connection_of(line) == before


def test_no_server_is_an_error_after_all_tries(server: RedisServer) -> None:
    line = transport_for(server.url.replace(server.url.split(":")[2].split("/")[0], "1"))

    with pytest.raises(RedisConnectionError):
        ask(line, "PING")
