"""Cancelled calls: they end and release their keys, at any moment and however often cancelled."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import anyio
import pytest

from celery_idempotent import Idempotency, State
from celery_idempotent.lease.asyncio_heartbeat import asyncio_heartbeat
from celery_idempotent.store import scripts
from celery_idempotent.store.run_sync import run_sync
from tests.faults.proxy import Proxy
from tests.functions.cancellation import (
    FOREVER,
    MOMENTS,
    WAYS,
    Moment,
    RecordHarness,
    beginning,
    cancel_at_each_turn,
    cancel_by_anyio_timeout,
    cancel_once,
    done,
    eventually_async,
    idempotent_function,
    in_the_body,
    waiting,
)
from tests.servers.redis_server import RedisServer

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def harness(server: RedisServer, key: str) -> Iterator[RecordHarness]:
    with Proxy(server.url) as proxy:
        harness = RecordHarness(server, proxy, key)
        yield harness
        harness.close()


async def warm_up(harness: RecordHarness) -> None:
    """Loads every script, and opens a connection."""
    async with harness.idem.execution("warm") as execution:
        await execution.step("warm", done)
        await execution.complete()
    async with harness.idem.execution("also warm"):
        pass


def is_settled(harness: RecordHarness, moment: Moment) -> bool:
    """Returns whether no key is STARTED; a released key with steps keeps a record."""
    records = [harness.record(key) for key in moment.keys]
    return not any(record and record.state is State.STARTED for record in records)


def is_cleaned_up(harness: RecordHarness, moment: Moment) -> bool:
    return (
        is_settled(harness, moment)
        and len(asyncio.all_tasks()) == 1
        and not asyncio_heartbeat().held()
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", MOMENTS)
def test_a_cancelled_call_ends_and_releases_its_key(
    harness: RecordHarness, at: Any, way: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def cancel() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, error: loop_errors.append(error))
        await warm_up(harness)
        moment = at(harness)
        before = harness.connections()
        started_at = time.thread_time()
        await way(moment.call, moment.due)
        if way is cancel_once:
            assert is_settled(harness, moment)
        await eventually_async(lambda: is_cleaned_up(harness, moment), "the call is cleaned up")
        # A waiting call has two connections, and the call that it waits for has a third.
        assert harness.connections() - before <= (3 if at is waiting else 1)
        assert time.thread_time() - started_at < 5
        await harness.idem.aclose()

    loop_errors: list[Any] = []
    with caplog.at_level(logging.INFO):
        asyncio.run(cancel())
    assert loop_errors == []
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


@pytest.mark.parametrize("way", WAYS)
def test_many_cancelled_calls_share_their_connections(harness: RecordHarness, way: Any) -> None:
    async def cancel() -> None:
        await warm_up(harness)
        before = harness.connections()
        for _ in range(50):
            moment = in_the_body(harness)
            await way(moment.call, moment.due)
        await eventually_async(lambda: is_cleaned_up(harness, moment), "the call is cleaned up")
        assert harness.connections() - before <= 6
        await harness.idem.aclose()

    asyncio.run(cancel())


@pytest.mark.parametrize("way", WAYS)
def test_a_cancelled_call_does_not_wait_for_a_frozen_store(key: str, way: Any) -> None:
    """The call ends within a second; its key is released once the store replies."""

    async def cancel(server: RedisServer) -> None:
        idem = Idempotency(server.url, key_prefix=key, lease=300, redis_timeout=60)
        await (await idem.abegin_many(["warm"])).release_many()
        server.pause()
        try:
            started_at = time.monotonic()
            await way(
                lambda: idem.idempotent(done, name="shop.frozen", key=None)(), asyncio.sleep(0.1)
            )
            assert time.monotonic() - started_at < 30
        finally:
            server.resume()
        await eventually_async(lambda: len(asyncio.all_tasks()) == 1, "the call ends")
        assert [*idem.records()] == []
        await idem.aclose()
        idem.close()

    with RedisServer.start(config={}) as server:
        asyncio.run(cancel(server))


def test_the_end_of_the_loop_waits_for_the_release_by_a_cancelled_call(
    harness: RecordHarness,
) -> None:
    moments = []

    async def cancel() -> None:
        await warm_up(harness)
        moments.append(beginning(harness))
        await cancel_by_anyio_timeout(moments[0].call, moments[0].due)
        assert len(asyncio.all_tasks()) > 1

    anyio.run(cancel)
    assert harness.record(moments[0].keys[0]) is None


def test_a_call_that_is_cancelled_with_its_loop_is_completed(harness: RecordHarness) -> None:
    keys = []

    async def cancel() -> None:
        await warm_up(harness)
        charge = idempotent_function(harness, done)
        due = harness.delay_reply("complete")
        keys.append(charge.idempotency_key_of("1"))
        task = asyncio.create_task(charge("1"))
        await due
        assert not task.done()

    asyncio.run(cancel())
    assert harness.record(keys[0]).result == "done"


def test_steps_of_several_tasks_are_stored_before_the_key_is_released(
    harness: RecordHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async def cancel() -> None:
        await warm_up(harness)
        attempts = []

        async def body() -> None:
            attempts.append(None)
            execution: Any = harness.idem.current
            await asyncio.gather(*(execution.step(f"{n}", count) for n in range(3)))
            if len(attempts) == 1:
                await asyncio.sleep(FOREVER)

        async def count() -> None:
            counts.append(None)

        charge = idempotent_function(harness, body)
        await cancel_at_each_turn(lambda: charge("1"), harness.delay_reply("save_step"))
        await eventually_async(lambda: len(asyncio.all_tasks()) == 1, "the call is cleaned up")
        await charge("1")
        assert counts == [None] * 3
        await harness.idem.aclose()

    counts: list[None] = []
    asyncio.run(cancel())
    assert "has lost its lease" not in caplog.text


class TestFunctions:
    @pytest.mark.parametrize("moment", ["begin", "complete"])
    def test_a_call_that_is_cancelled_during_a_reply_is_settled(
        self, idem: Idempotency, run: Run, key: str, moment: str
    ) -> None:
        runs = []

        @idem.idempotent(key="{order}", name="shop.slow")
        async def charge(order: str) -> str:
            runs.append(order)
            return "charged"

        async def cancel() -> None:
            await charge("warm " + key)
            runs.clear()
            store = idem.async_executor.store
            send, commands = store._transport.send, []

            async def cancel_before_return(command: Any, **followup: Any) -> Any:
                reply = await send(command, **followup)
                if command[1] == scripts.load(moment).sha:
                    commands.append(command)
                    task.cancel()
                    await asyncio.sleep(0)
                return reply

            store._transport.send = cancel_before_return  # type: ignore[method-assign]
            task = asyncio.create_task(charge(key))
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(commands) == 1  # the command was neither aborted nor repeated

        run(cancel())
        record = run_sync(idem.executor.store.get(charge.idempotency_key_of(key)))
        if moment == "begin":
            assert (runs, record) == ([], None)
        else:
            assert record is not None
            assert (runs, record.result) == ([key], "charged")

    def test_a_waiting_duplicate_ends_at_once(self, idem: Idempotency, run: Run, key: str) -> None:
        started, finish = asyncio.Event(), asyncio.Event()

        @idem.idempotent(key="{order}", name="shop.slow")
        async def charge(order: str) -> str:
            started.set()
            await finish.wait()
            return "charged"

        async def cancel() -> str:
            first = asyncio.create_task(charge(key))
            await started.wait()
            duplicate = asyncio.create_task(charge(key))
            # By then it is most likely waiting; it must end in any case.
            await asyncio.sleep(0.1)
            duplicate.cancel()
            with pytest.raises(asyncio.CancelledError):
                await duplicate
            assert not first.done()
            finish.set()
            return await first

        assert run(cancel()) == "charged"
