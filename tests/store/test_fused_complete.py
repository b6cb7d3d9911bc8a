"""Fused completion: the script that stores the outcome writes the result backend's result, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from celery_idempotent.core.record import State
from celery_idempotent.core.store import commands, run_sync, scripts
from celery_idempotent.core.store.commands import BackendResult
from celery_idempotent.core.store.scripts import Reply
from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import (
    RESULT,
    RETENTION_MS,
    Harness,
    close_stores,
    narrow_user,
    store_at,
)
from tests.waiting import eventually

NAME = b"celery-task-meta-1"
META = b'{"status": "SUCCESS", "result": "charged"}'
SECONDS = 500
WRITTEN = BackendResult(NAME, META, SECONDS)


@pytest.fixture
def published(harness: Harness, server: RedisServer) -> Iterator[Callable[[], list[bytes]]]:
    """Returns the messages that were published since the last call."""
    with harness.client.pubsub(ignore_subscribe_messages=True) as subscriber:
        subscriber.subscribe(NAME)
        subscriber.get_message(timeout=5)

        def read() -> list[bytes]:
            harness.client.publish(NAME, b"end")
            found = []
            while True:
                message = subscriber.get_message(timeout=5)
                if message is None:
                    continue
                if message["data"] == b"end":
                    return found
                found.append(message["data"])

        yield read


def complete(harness: Harness, token: int) -> Reply:
    command = commands.complete(harness.key, token, RESULT, RETENTION_MS, WRITTEN)
    return run_sync(harness.store.execute(command))


Published = Callable[[], list[bytes]]


@pytest.mark.core
def test_stores_both_at_once(harness: Harness, server: RedisServer, published: Published) -> None:
    started = harness.started()

    assert complete(harness, started.token)._replace(now_ms=0) == ("written", b"", 0)

    record = harness.record()
    assert (record.state, record.token) == (State.COMPLETED, started.token)
    assert (record.format, record.body) == (RESULT.format, RESULT.body)
    assert RETENTION_MS - 10_000 < harness.left_ms() <= RETENTION_MS
    assert harness.client.get(NAME) == META
    assert SECONDS - 10 < harness.client.ttl(NAME) <= SECONDS
    assert published() == [META]


def test_a_lost_reply_writes_once(proxied: Harness, proxy: Proxy, published: Published) -> None:
    proxied.client.script_load(scripts.load("settle").source)
    token = proxied.started().token
    sha = scripts.load("settle").sha
    proxy.lose_reply(to=sha)

    assert complete(proxied, token).case == "ok", "Celery finds the result"

    assert len(proxy.requests_with(sha)) == 2
    assert proxied.client.get(NAME) == META
    assert published() == [META]


def test_a_server_that_refuses_the_second_key_completes_the_record(
    harness: Harness, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with narrow_user(harness, server.url, keys=["idem:*"]) as url, Proxy(url) as proxy:
        limited = Harness(store_at(proxy.url), harness.client)

        for _ in range(2):
            harness.forget()
            token = harness.started().token
            proxy.requests.clear()
            assert complete(limited, token).case == "ok"
            assert harness.state is State.COMPLETED
        close_stores()

    assert [b"celery-task-meta" in each for each in proxy.requests].count(True) == 0
    assert caplog.text.count("refuses fused completion") == 1
    assert harness.client.get(NAME) is None


def test_a_passing_error_leaves_it_on(proxied: Harness, proxy: Proxy, server: RedisServer) -> None:
    client, is_writable = proxied.client, Event()
    sha = client.script_load(scripts.load("settle").source)
    proxy.delay_reply(sha, 0, after=is_writable)
    token = proxied.started().token
    client.config_set("maxmemory", 1)
    client.config_resetstat()
    with ThreadPoolExecutor() as pool:
        completion = pool.submit(complete, proxied, token)
        try:
            eventually(lambda: client.info("errorstats"))
        finally:
            client.config_set("maxmemory", 0)
            is_writable.set()
        assert completion.result().case == "ok"
    proxied.forget()

    assert complete(proxied, proxied.started().token).case == "written"


def test_without_publish_celery_writes_the_result(harness: Harness, server: RedisServer) -> None:
    with narrow_user(harness, server.url, keys=["*"], reset_channels=True) as url:
        silent = Harness(store_at(url), harness.client)

        assert complete(silent, harness.started().token).case == "ok"
    assert harness.state is State.COMPLETED
    assert harness.client.get(NAME) is None


def test_a_refused_replay_leaves_it_on(harness: Harness, server: RedisServer) -> None:
    """The record stays as it is, whatever it is."""
    with narrow_user(harness, server.url, keys=["idem:*"]) as url:
        store = store_at(url)

        assert not run_sync(store.write_result(harness.key, WRITTEN))
        assert not store._refuses_second_key
    assert harness.client.get(NAME) is None
