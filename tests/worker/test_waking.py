"""Duplicates that are put back during another call are woken when it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from celery.result import AsyncResult

from celery_idempotent import CorruptRecordError
from tests.apps import run_command
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.harness import FAST_REDELIVERY, LOST_BROKER, OpenShop, Shop
from tests.worker.tasks import (
    SHORT_LEASE,
    OutOfStockError,
    flaky,
    in_turn,
    pack,
    short_lease,
    sleepy_in_turn,
    try_early,
    try_early_in_turn,
)

#: The longest time in seconds from an end to its effect on a busy machine; a message that is not
#: woken waits for 45 s at least.
AT_ONCE = 5.0


def one_at_a_time(shop: Shop, number: int, seconds: float, puts_back: float = 1.5) -> list[Any]:
    """Runs calls of one key; returns the start, the number and the end of each, in order.

    Args:
        puts_back: how often each is put back, on average, at most.
    """
    results = [sleepy_in_turn.delay("x", seconds, each) for each in range(number)]
    runs = sorted(result.get(timeout=SOON) for result in results)
    assert all(after[0] >= before[2] for before, after in pairwise(runs))
    conflicts = [len(shop.ledger.signals(result.id, "conflicted")) for result in results]
    assert sum(conflicts) <= puts_back * number
    return runs


def duplicates_of(shop: Shop, task: Any, order: str, number: int = 2) -> list[AsyncResult]:
    """Returns calls that wait for a running one, which has begun before."""
    results = [shop.ledger.duplicate(task, order) for _ in range(number)]
    eventually(lambda: waiting(shop, task, order) == number, f"{number} messages wait")
    return results


def waiting(shop: Shop, task: Any, order: str) -> int:
    """Returns how many messages wait in workers for the key of an order."""
    return sum(each["messages"] for each in waits(shop, task, order))


def waits(shop: Shop, task: Any, order: str) -> list[dict[str, Any]]:
    """Returns what each worker replies about the key of an order."""
    replies = inspect(shop)._request("idempotency_waiting") or {}
    key = task.idempotency_key_of(order)
    return [each for lines in replies.values() for each in lines if each["key"] == str(key)]


def inspect(shop: Shop) -> Any:
    """Returns Celery's `Inspect`, which waits for the replies of the workers that run.

    A worker that has just started may miss a request; another one follows soon.
    """
    return shop.app.control.inspect(timeout=3, limit=shop.running)


@contextmanager
def at_once() -> Iterator[None]:
    """Asserts that the block takes less time than a message that is not woken."""
    since = time.monotonic()
    yield
    assert time.monotonic() - since < AT_ONCE


def values_at_once(shop: Shop, order: str, *results: Any) -> list[Any]:
    """Releases the order, and returns the values of calls, which they get at once."""
    with at_once():
        shop.ledger.release(order)
        return [each.get(timeout=SOON) for each in results]


def assert_answered_at_once(shop: Shop, order: str, first: Any, duplicates: list[Any]) -> None:
    values = values_at_once(shop, order, first, *duplicates)
    assert values == [values[0]] * len(values)
    conflicts = [len(shop.ledger.signals(each.id, "conflicted")) for each in duplicates]
    assert conflicts == [1] * len(duplicates)
    scheduled = [each for lines in (inspect(shop).scheduled() or {}).values() for each in lines]
    assert not {each["request"]["id"] for each in scheduled} & {each.id for each in duplicates}


def begun(shop: Shop, task: Any, order: str, number: int = 2) -> tuple[Any, list[AsyncResult]]:
    """Returns a running call, and calls that wait for it."""
    return shop.ledger.start(task, order), duplicates_of(shop, task, order, number)


# Celery's handler enters a message with an ETA by `consumer.timer.call_at`, in each version.
@pytest.mark.core
def test_a_result_answers_all_at_once(shop: Shop, order: str) -> None:
    assert_answered_at_once(shop, order, *begun(shop, pack, order))
    assert len(shop.ledger.runs(order)) == 1


@pytest.mark.core
def test_after_an_error_the_next_runs_at_once(shop: Shop, order: str) -> None:
    first = shop.ledger.start(flaky, order, 2)
    duplicates = [shop.ledger.duplicate(flaky, order, 2) for _ in range(3)]
    with at_once():
        shop.ledger.release(order)
        ends = [each.get(timeout=SOON, propagate=False) for each in (first, *duplicates)]
    assert [type(end) for end in ends] == [OutOfStockError, OutOfStockError, str, str]


@pytest.mark.core
def test_after_the_death_of_its_process(shop: Shop, order: str) -> None:
    first, duplicates = begun(shop, pack, order)
    shop.ledger.kill(order)
    shop.ledger.wait_for_run(order, 2)
    values = values_at_once(shop, order, first, *duplicates)
    assert values == [values[0]] * 3


def test_the_holder_is_shown_after_another_has_begun(shop: Shop, order: str) -> None:
    first, duplicates = begun(shop, in_turn, order)
    shop.ledger.kill(order)
    holder = shop.ledger.wait_for_run(order, 2).task_id
    with at_once():
        eventually(
            lambda: {each["held_by"] for each in waits(shop, in_turn, order)} == {holder},
            "the holder is read",
        )
    values_at_once(shop, order, first, *duplicates)


@pytest.mark.core
@pytest.mark.parametrize(
    ("task", "comes"),
    [
        (try_early, "alone"),
        (try_early, "after a duplicate"),
        (try_early_in_turn, "before a duplicate"),
    ],
)
def test_a_retry_is_woken(shop: Shop, order: str, task: Any, comes: str) -> None:
    ledger, first = shop.ledger, shop.ledger.start(task, order)
    duplicates = duplicates_of(shop, task, order, 1) if comes == "after a duplicate" else []
    ledger.hold(f"retry of {order}")
    ledger.release(order)
    ledger.wait_for_signal(first.id, "conflicted")
    if comes == "before a duplicate":
        duplicates = [ledger.duplicate(task, order)]
    eventually(lambda: waiting(shop, task, order) == 1 + len(duplicates), "the retry waits")
    values = values_at_once(shop, f"retry of {order}", first, *duplicates)
    assert [run.end for run in ledger.runs(order)][:2] == ["Retry", "returned"]
    assert len(set(values)) == (1 if task is try_early else len(values))


@pytest.mark.core
def test_turns_are_taken_in_order(shop: Shop, order: str) -> None:
    first, duplicates = begun(shop, in_turn, order, 5)
    results = [each["receipt"] for each in values_at_once(shop, order, first, *duplicates)]
    assert len(set(results)) == 6
    ids = [run.task_id for run in shop.ledger.runs(order)]
    assert ids == [first.id, *(each.id for each in duplicates)]


def test_commands_show_what_waits_and_how_soon_it_was_answered(shop: Shop, order: str) -> None:
    first, duplicates = begun(shop, pack, order)
    call = "explain", "shop.pack", json.dumps([order])
    assert json.loads(run_command(shop.app, *call, "--json"))["waiting"]["messages"] == 2
    assert "2 messages, since 20" in run_command(shop.app, *call)
    assert_answered_at_once(shop, order, first, duplicates)
    counts = json.loads(run_command(shop.app, "stats", "--json"))["tasks"]["shop.pack"]["counts"]
    assert sum(number for name, number in counts.items() if name.startswith("answered_")) >= 2
    assert "Duplicates that were put back: " in run_command(shop.app, "stats")


def test_the_lease_of_a_dead_worker_ends(open_shop: OpenShop, order: str) -> None:
    with open_shop() as shop:
        dying = shop.start_worker("--queues", "first", concurrency=1)
        shop.start_worker(concurrency=1)
        shop.ledger.start(short_lease, order, queue="first")
        duplicate = shop.ledger.duplicate(short_lease, order)
        dying.kill()
        since = time.monotonic()
        shop.ledger.wait_for_run(order, 2)
        assert time.monotonic() - since < 1.1 * SHORT_LEASE + AT_ONCE
        shop.ledger.release(order)
        assert duplicate.get(timeout=SOON)


@pytest.mark.exhaustive
def test_revoked_and_expired_messages_are_passed_over(open_shop: OpenShop, order: str) -> None:
    with open_shop() as shop:
        shop.start_worker(concurrency=2)
        shop.ledger.start(flaky, order, 1)
        revoked = shop.ledger.duplicate(flaky, order, 1)
        expired = shop.ledger.duplicate(flaky, order, 1, expires=3)
        last = shop.ledger.duplicate(flaky, order, 1)
        shop.control("revoke", revoked.id)
        time.sleep(3)
        assert values_at_once(shop, order, last) == ["found one"]
        assert [revoked.state, expired.state] == ["REVOKED"] * 2


def test_a_record_that_cannot_be_read_refuses_what_waits_for_it(shop: Shop, order: str) -> None:
    first, (duplicate,) = begun(shop, pack, order, 1)
    with at_once():
        with shop.redis.pipeline() as pipeline:
            name = f"idem:{pack.idempotency_key_of(order)}"
            pipeline.delete(name).hset(name, "x", "y").execute()
        with pytest.raises(CorruptRecordError):
            duplicate.get(timeout=SOON)
        runs = one_at_a_time(shop, 5, 0.01)
    assert runs[-1][2] - runs[0][0] < 2, "the others are not delayed"
    shop.ledger.release(order)
    first.get(timeout=SOON)


class TestRedis:
    @pytest.fixture(scope="class")
    @staticmethod
    def shared_shop(open_shop: OpenShop, store: RedisServer) -> Iterator[Shop]:
        with open_shop(idempotency_redis_url=store.url) as shop:
            shop.start_worker(concurrency=2)
            yield shop

    @pytest.mark.exhaustive
    def test_has_no_connection_and_the_worker_no_thread_without_waiting_messages(
        self, shop: Shop, store: RedisServer, order: str
    ) -> None:
        worker, client = shop.workers[0], store.client()
        pid = worker.container.process.pid

        def number() -> tuple[int, int]:
            clients = client.client_list()
            tracking = [each for each in clients if each["sub"] != "0" or "t" in each["flags"]]
            return len(list(Path(f"/proc/{pid}/task").iterdir())), len(tracking)

        threads, tracking = number()
        assert not tracking, "nothing has waited yet"
        first, duplicates = begun(shop, pack, order)
        assert number() == (threads + 2, 2)
        assert_answered_at_once(shop, order, first, duplicates)
        eventually(lambda: number() == (threads, 0), "thread and connections end", 30)

    @pytest.mark.parametrize("lost", ["its connections", "Redis"])
    def test_is_lost_and_back(self, shop: Shop, store: RedisServer, order: str, lost: str) -> None:
        first, duplicates = begun(shop, pack, order)
        if lost == "Redis":
            store.restart()
        else:
            for kind in ("pubsub", "normal"):
                store.client().execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        assert_answered_at_once(shop, order, first, duplicates)


def test_the_broker_is_lost_and_back(open_shop: OpenShop, order: str) -> None:
    with open_shop(**LOST_BROKER, broker_transport_options=FAST_REDELIVERY) as shop:
        worker = shop.start_worker(concurrency=2)
        first = shop.ledger.start(pack, order)
        duplicate = shop.ledger.duplicate(pack, order)
        database = str(shop.redis.connection_pool.connection_kwargs["db"])
        for client in shop.redis.client_list(_type="normal"):
            if client["db"] == database:  # the ledger has another one
                shop.redis.client_kill_filter(_id=client["id"], skipme=True)
        worker.wait_for_log("Connection to broker lost")
        shop.ledger.wait_for_signal(duplicate.id, "conflicted", 2)
        values = values_at_once(shop, order, duplicate, first)
        assert values[0] == values[1]


SOFT = {"worker_soft_shutdown_timeout": 1.0, "worker_enable_soft_shutdown_on_idle": True}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("signal", "settings"),
    [("SIGTERM", {}), ("SIGQUIT", {}), ("SIGQUIT", SOFT), ("SIGHUP", {}), ("SIGKILL", {})],
    ids=["warm", "cold", "soft", "SIGHUP", "killed"],
)
def test_the_end_of_a_worker_leaves_its_waiting_messages_to_others(
    open_shop: OpenShop, order: str, signal: str, settings: dict[str, Any]
) -> None:
    redelivery = {"broker_transport_options": FAST_REDELIVERY, "idempotency_redeliver_after": 3.0}
    with open_shop(**redelivery, **settings) as shop:
        shop.start_worker("--queues", "first", concurrency=1)
        ending = shop.start_worker(concurrency=2)
        first = shop.ledger.start(pack, order, queue="first")
        duplicates = duplicates_of(shop, pack, order, 5)
        ending.kill(signal)
        if signal == "SIGHUP":
            eventually(lambda: ending.logs().count("ready.") == 2, "it has started again")
        else:
            ending.wait_for_exit()
            shop.start_worker(concurrency=2)
        eventually(lambda: waiting(shop, pack, order) == 5, "its messages wait again")
        values = values_at_once(shop, order, first, *duplicates)
        assert values == [values[0]] * 6
        assert len(shop.ledger.runs(order)) == 1
        shop.wait_until_empty()


@pytest.mark.exhaustive
def test_the_pool_restarts(open_shop: OpenShop, order: str) -> None:
    with open_shop(worker_pool_restarts=True) as shop:
        shop.start_worker("--queues", "first", concurrency=1)
        name = f"{shop.start_worker(concurrency=2).name()}@here"
        first = shop.ledger.start(pack, order, queue="first")
        duplicates = duplicates_of(shop, pack, order, 5)
        (reply,) = shop.app.control.pool_restart(destination=[name], reply=True, timeout=5.0)
        assert reply == {name: {"ok": "reload started"}}
        assert_answered_at_once(shop, order, first, duplicates)


@pytest.mark.exhaustive
@pytest.mark.core
def test_rate_limited_messages_wait_for_both(open_shop: OpenShop, order: str) -> None:
    annotations = {"shop.sleepy_in_turn": {"rate_limit": "2/s"}}
    with open_shop(task_annotations=annotations) as shop:
        for _ in range(2):
            shop.start_worker(concurrency=2)
        runs = one_at_a_time(shop, 6, 0.1)
        assert runs[-1][2] - runs[0][0] < 3 + AT_ONCE


@pytest.mark.exhaustive
@pytest.mark.parametrize("pool", ["threads", "gevent", "eventlet", "solo"])
def test_with_each_pool(open_shop: OpenShop, order: str, pool: str) -> None:
    if pool in ("gevent", "eventlet") and find_spec(pool) is None:
        pytest.skip(f"{pool} is not installed")
    with open_shop() as shop:
        shop.start_worker("--pool", pool, concurrency=5)
        if pool == "solo":  # it takes no other message while it runs one
            shop.start_worker("--queues", "first", concurrency=1)
        queue = "first" if pool == "solo" else "celery"
        first = shop.ledger.start(pack, order, queue=queue)
        assert_answered_at_once(shop, order, first, duplicates_of(shop, pack, order))
        if pool != "solo":
            one_at_a_time(shop, 5, 0.1)
