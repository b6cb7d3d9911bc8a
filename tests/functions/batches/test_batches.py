"""Batches: one round trip for any number of keys, and a decision for each key."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from celery_idempotent import Decision, Idempotency, ResultNotStoredError, StoreUnavailableError
from celery_idempotent.core.lease.heartbeat import heartbeat
from celery_idempotent.errors import IdempotencyError, KeyReusedError, LeaseLostError, SettingsError
from tests.functions.conftest import LEASE, Calls, Run, abandon, decisions
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually


@pytest.fixture
def keys(key: str) -> list[str]:
    return [f"{key}:{n}" for n in range(1000)]


def test_begin_complete_and_release_take_one_round_trip_each(
    idem: Idempotency, monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    idem.begin_many(["warm"]).complete_many()
    idem.begin_many(["too"]).release_many()
    transport = idem.executor.store._transport
    send, sizes = transport.send, []  # type: ignore[union-attr]

    def count_requests(*requests: Any, **options: Any) -> Any:
        sizes.append(len(requests))
        return send(*requests, **options)

    monkeypatch.setattr(transport, "send", count_requests)
    batch = idem.begin_many(keys)
    batch.complete_many(dict.fromkeys(keys[:500]))
    batch.release_many()

    assert sizes == [1000, 500, 500]


def test_each_key_has_a_decision(idem: Idempotency, client: redis.Redis, key: str) -> None:
    done, held, fresh, other, broken = (f"{key}:{name}" for name in "abcde")
    idem.begin_many([done, other], [1, 1]).complete_many({done: "done", other: None})
    holder = idem.begin_many([held])
    client.set(idem.executor.store.name(idem.key_of(broken)), b"garbage", ex=60)

    batch = idem.begin_many([done, held, fresh, other, broken, fresh, fresh], [1, 1, 1, 2, 1, 1, 2])

    expected = "REPLAY CONFLICT RUN REJECTED REJECTED DUPLICATE REJECTED"
    assert [decision.name for decision in decisions(batch)] == expected.split()
    assert batch[0].replay == "done"
    assert "is held by" in str(batch[1].error)
    assert isinstance(batch[3].error, KeyReusedError)
    assert "cannot be read" in str(batch[4].error)
    assert batch.pending == [fresh]
    assert (batch[2].token > 0, batch[2].attempt) == (True, 1)
    batch.release_many()
    holder.release_many()


def test_the_end_of_the_block_releases_pending_keys(idem: Idempotency, key: str) -> None:
    with idem.begin_many([]) as empty:
        assert (len(empty), empty.complete_many()) == (0, {})
    one, two = f"{key}:1", f"{key}:2"
    with idem.begin_many([one, two]) as batch:
        batch.complete_many({one: 1})
        with pytest.raises(IdempotencyError, match="is not pending in this batch"):
            batch.complete_many({one: 1})

    with idem.begin_many([one, two]) as again:
        assert decisions(again) == [Decision.REPLAY, Decision.RUN]
    assert not heartbeat.leases()


def test_steps_of_an_entry_run_once(idem: Idempotency, key: str) -> None:
    numbers = iter(range(9))
    with idem.begin_many([f"{key}:1", f"{key}:2"]) as batch:
        executions: list[Any] = [entry.execution for entry in batch]
        booked = [each.step("book", numbers.__next__) for each in executions]

    assert booked == [0, 1]
    with idem.begin_many([f"{key}:2"]) as again:
        execution: Any = again[0].execution
        assert execution.step("book", numbers.__next__) == 1


def test_a_repeated_key_is_released_once(idem: Idempotency, key: str) -> None:
    batch = idem.begin_many([key])

    batch.release_many([key, key])

    assert batch.pending == []
    assert not heartbeat.leases()
    with idem.begin_many([key]) as again:
        assert decisions(again) == [Decision.RUN]


class Interrupting:
    """A value whose serialization is interrupted, as by Ctrl-C."""

    def __json__(self) -> str:
        raise KeyboardInterrupt


def test_an_interruption_releases_keys_that_are_not_encoded(idem: Idempotency, key: str) -> None:
    one, two = f"{key}:1", f"{key}:2"
    with idem.begin_many([one, two]) as batch:
        with pytest.raises(KeyboardInterrupt):
            batch.complete_many({one: 1, two: Interrupting()})
        assert not batch.pending
    assert not heartbeat.leases()
    with idem.begin_many([one, two]) as again:
        assert decisions(again) == [Decision.REPLAY, Decision.RUN]


def test_an_interrupted_write_does_not_leave_leases_that_are_renewed(
    idem: Idempotency, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    transport = idem.executor.store._transport
    send = transport.send  # type: ignore[union-attr]

    async def send_and_interrupt(*requests: Any, **options: Any) -> Any:
        await send(*requests, **options)
        raise KeyboardInterrupt

    with idem.begin_many([key]) as batch:
        monkeypatch.setattr(transport, "send", send_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            batch.complete_many()
        monkeypatch.undo()
        assert batch.pending == []
    assert not heartbeat.leases()
    assert decisions(idem.begin_many([key])) == [Decision.REPLAY]


@pytest.mark.exhaustive
def test_the_heartbeat_renews_all_leases(server: RedisServer, key: str) -> None:
    idem = Idempotency(server.url, key_prefix=key, lease=LEASE)
    names = [str(n) for n in range(20)]
    batch = idem.begin_many(names)
    started_at = time.monotonic()

    eventually(lambda: time.monotonic() - started_at > 1.4 * LEASE)
    batch.check()
    assert set(decisions(idem.begin_many(names))) == {Decision.CONFLICT}
    batch.release_many()
    idem.close()


def test_a_batch_that_is_dropped_is_not_renewed(idem: Idempotency, key: str) -> None:
    batch = idem.begin_many([key])
    assert heartbeat.leases()

    del batch

    assert not heartbeat.leases()


def test_the_error_of_a_key_that_was_taken_over_is_returned(idem: Idempotency, key: str) -> None:
    one, two = f"{key}:1", f"{key}:2"
    batch = idem.begin_many([one, two])
    abandon(idem, two)
    successor = idem.begin_many([two])
    assert successor[0].attempt == 2

    errors = batch.complete_many()

    assert list(errors) == [two]
    assert isinstance(errors[two], LeaseLostError)
    successor.release_many()


def test_without_redis_a_batch_is_an_error() -> None:
    """In addition to `test_values.TestWithoutProtection`."""
    with pytest.raises(StoreUnavailableError):
        Idempotency("redis://127.0.0.1:1", redis_timeout=0.2).begin_many(["a"])


def test_wait_replicas_is_rejected(server: RedisServer) -> None:
    engine = Idempotency(server.url, wait_replicas=1)

    with pytest.raises(SettingsError, match="a batch does not wait for replicas"):
        engine.begin_many(["a"])


def test_the_error_of_the_block_is_no_outcome(server: RedisServer, calls: Calls, key: str) -> None:
    """The block is not the body of one key, so that `replay_errors` does not apply."""

    def fail(_: Any) -> None:
        raise LookupError

    calls.idem = Idempotency(server.url, key_prefix=key, replay_errors=(Exception,))
    with pytest.raises(LookupError):
        calls.within(calls.batch([key]), fail)

    assert decisions(calls.use_batch([key])[0]) == [Decision.RUN]
    calls.close()


def test_async_batches_offload_large_values(
    server: RedisServer, run: Run, keys: list[str], tmp_path: Path
) -> None:
    """The storage is used in a thread, while all keys of the batch wait."""
    keys = keys[:5]
    app = Celery(backend=server.url)
    idem = Idempotency(app, max_result_size=100, offload_backend=f"file://{tmp_path}")

    async def use_batches() -> None:
        async with await idem.abegin_many(keys) as batch:
            assert not await batch.complete_many({key: key * 10 for key in keys})
        again = await idem.abegin_many(keys)
        assert [entry.replay for entry in again] == [key * 10 for key in keys]
        objects = list(tmp_path.iterdir())
        assert len(objects) == len(keys)
        for path in objects:
            path.unlink()
        with pytest.raises(ResultNotStoredError, match="no longer in"):
            async with idem.execution(keys[0]):
                pytest.fail("unreachable")
        await idem.aclose()

    run(use_batches())
    idem.close()


def test_a_cancelled_batch_releases_all_keys(idem: Idempotency, run: Run, keys: list[str]) -> None:
    async def use_batch() -> None:
        store = idem.async_executor.store
        execute_all = store.execute_all

        async def cancel_before_return(batch: Any) -> Any:
            replies = await execute_all(batch)
            if batch[0].script.name == "begin" and not cancelled:
                cancelled.append(None)
                task.cancel()
                await asyncio.sleep(0)
            return replies

        await (await idem.abegin_many(["warm"])).release_many()
        store.execute_all = cancel_before_return  # type: ignore[method-assign]
        cancelled: list[None] = []
        task = asyncio.create_task(idem.abegin_many(keys))
        with pytest.raises(asyncio.CancelledError):
            await task

    run(use_batch())
    with idem.begin_many(keys) as batch:
        assert set(decisions(batch)) == {Decision.RUN}
