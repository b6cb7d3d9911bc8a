"""RecordStore on an event loop: the same replies and errors as over a blocking one."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from celery_idempotent.core.store import commands, run_sync, scripts
from celery_idempotent.core.store.commands import LeaseExtension
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.core.store.transport.server import MAX_CONNECTIONS
from celery_idempotent.errors import StoreUnavailableError
from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.store import deployments
from tests.store.record_harness import KEY, LEASE_MS, RETENTION_MS, Harness, begin, store_at

#: The other files test the scripts on every kind of server.
pytestmark = deployments.on(deployments.PLAIN[0])

Story = Callable[[RecordStore], Awaitable[Any]]


def run_story(story: Story, url: str, **config: Any) -> Any:
    """Return the result of `story`, on its own event loop and store."""

    async def run() -> Any:
        settings = StoreConfig(url=url, **config)
        store = RecordStore(settings, lambda record: record.body, is_async=True)
        try:
            return await story(store)
        finally:
            await store.aclose()

    return asyncio.run(run())


def test_a_lost_reply_is_sent_again(proxied: Harness, proxy: Proxy, server: RedisServer) -> None:
    async def run(store: RecordStore) -> str:
        await store.execute(begin())  # loads the script
        proxied.forget()
        proxy.lose_reply(to=scripts.load("begin").sha)
        return (await store.execute(begin())).case

    assert run_story(run, proxy.url) == "begun"
    assert proxied.record().attempt == 1


# A client of redis-py that is closed while it connects may connect once more. The garbage collector
# then closes its connection, with a warning.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_command_is_resent_when_its_connection_is_closed(server: RedisServer) -> None:
    async def run(store: RecordStore) -> None:
        # The store is closed after each number of loop iterations that a command may take.
        for turns in range(40):
            calls = [asyncio.create_task(store.execute(begin())) for _ in range(3)]
            batch = asyncio.create_task(store.execute_all([begin()]))
            for _ in range(turns):
                await asyncio.sleep(0)
            await store.aclose()
            for answer in [*await asyncio.gather(*calls), *await batch]:
                assert isinstance(answer, Reply)

    server.client().flushall()
    run_story(run, server.url)
    gc.collect()


def test_any_number_of_tasks_can_send_at_once(harness: Harness, server: RedisServer) -> None:
    before = harness.client.info("clients")["connected_clients"]

    async def run(store: RecordStore) -> list[Reply]:
        lost = [commands.mark_sent(type(KEY)(KEY.task, f"{n}"), 1) for n in range(2_000)]
        replies = await asyncio.gather(*map(store.execute, lost))
        # Opening one connection each would take seconds, and more than a server allows.
        opened = harness.client.info("clients")["connected_clients"] - before
        assert opened <= MAX_CONNECTIONS
        return replies

    assert {reply.case for reply in run_story(run, server.url, timeout=10.0)} == {"lost"}


def test_too_few_replicas_are_an_error(harness: Harness, server: RedisServer) -> None:
    async def run(store: RecordStore) -> None:
        with pytest.raises(StoreUnavailableError, match="only 0 of 1 replicas"):
            await store.execute(begin())

    harness.client.script_flush()
    run_story(run, server.url, wait_replicas=1, timeout=1.2)


@pytest.fixture
def silent(server: RedisServer) -> Iterator[RedisServer]:
    with RedisServer.start(config={}) as own:
        yield own


def test_a_frozen_server_blocks_a_heartbeat_for_its_timeout(silent: RedisServer) -> None:
    async def run(store: RecordStore) -> float:
        await store.ping()
        silent.pause()
        began = time.monotonic()
        try:
            with pytest.raises(StoreUnavailableError):
                await store.extend([LeaseExtension(KEY, 1, LEASE_MS, RETENTION_MS)], 0.1)
            return time.monotonic() - began
        finally:
            silent.resume()

    assert run_story(run, silent.url) < 2


@pytest.mark.parametrize("is_async", [False, True])
def test_a_short_lease_leaves_the_later_timeouts_alone(silent: RedisServer, is_async: bool) -> None:
    async def run(store: RecordStore) -> str:
        lease = LeaseExtension(KEY, 1, LEASE_MS, RETENTION_MS)
        await store.extend([lease], 0.1)
        silent.pause()
        resume = threading.Timer(0.5, silent.resume)
        resume.start()
        try:
            (reply,) = await store.extend([lease], 5)
        finally:
            resume.join()
        assert isinstance(reply, Reply)
        return reply.case

    if is_async:
        assert run_story(run, silent.url) == "lost"
    else:
        assert run_sync(run(store_at(silent.url))) == "lost"
