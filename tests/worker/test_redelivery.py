"""``idempotency_redeliver_after``: the messages of a dead worker come back soon, at a visibility
timeout of an hour, and those of a living one do not.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.core.task.receive import request
from celery_idempotent.redelivery.broker import RedisBroker, shorten_lock
from celery_idempotent.redelivery.unacked import UnackedMessages
from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.harness import FAST_REDELIVERY, LOST_BROKER, OpenShop, Shop
from tests.worker.tasks import open_door, pack

pytestmark = pytest.mark.slow

#: Seconds.
REDELIVER_AFTER = 2.0
#: Beyond the above: between two searches, for a worker to receive the message, and to begin.
SLACK = 5.0

#: kombu's default visibility timeout is an hour.
SETTINGS = {"idempotency_redeliver_after": REDELIVER_AFTER, "idempotency_lease": REDELIVER_AFTER}


def scores(shop: Shop) -> dict[str, float]:
    """Returns, by task, the seconds after which its message comes back without a renewal."""
    index = shop.redis.zrange("unacked_index", 0, -1, withscores=True)
    # Read afterwards: a message that is delivered meanwhile comes back no later than it should.
    now, scores = time.time(), {}
    for tag, score in index:
        message = shop.redis.hget("unacked", tag)
        if message is not None:
            for task in ("shop.pack", "shop.open_door"):
                if f'"task": "{task}"'.encode() in message:
                    scores[task] = score + 3600 - now
    return scores


def publish(shop: Shop, order: str, prefix: str = "") -> list[tuple[str, Any]]:
    """Publishes four calls, of which the only worker, with one process, runs one.

    Args:
        prefix: of kombu's names in Redis.

    Returns:
        Each order and its result: that of the running one, two prefetched ones, and one that waits
        for its ETA.
    """
    orders = [f"{order} {number}" for number in range(4)]
    for each in orders:
        shop.ledger.hold(each)
    results = [pack.apply_async(orders[:1], priority=6)]
    shop.ledger.wait_for_run(orders[0])
    results += [pack.apply_async([one], priority=n) for one, n in ((orders[1], 0), (orders[2], 9))]
    results.append(pack.apply_async(orders[3:], countdown=4))
    index = f"{prefix}unacked_index"
    eventually(lambda: shop.redis.zcard(index) == 4, "the worker has all messages")
    return list(zip(orders, results, strict=True))


def assert_soon(shop: Shop, calls: list[tuple[str, Any]], since: float) -> None:
    """Asserts that each call has a result, of an execution that has started soon after."""
    for each, result in calls:
        assert result.get(timeout=SOON)["receipt"]
        run = shop.ledger.runs(each)[-1]
        assert run.started_at - since < REDELIVER_AFTER + SLACK, each
        assert run.task_id == result.id


def ends(shop: Shop, calls: list[tuple[str, Any]]) -> list[list[str | None]]:
    """Returns how the executions of each call have ended."""
    return [[run.end for run in shop.ledger.runs(each)] for each, _ in calls]


@pytest.mark.core
@pytest.mark.parametrize(
    ("pool", "prefix"),
    [
        ("prefork", ""),
        pytest.param("threads", "", marks=pytest.mark.exhaustive),
        pytest.param("prefork", "shop:", marks=pytest.mark.exhaustive),
    ],
)
def test_all_that_a_killed_worker_had_runs_once_more_elsewhere(
    open_shop: OpenShop, order: str, pool: str, prefix: str
) -> None:
    options = {"global_keyprefix": prefix, "queue_order_strategy": "priority"} if prefix else {}
    with open_shop(**SETTINGS, broker_transport_options=options) as shop:
        worker = shop.start_worker("--pool", pool, concurrency=1)
        calls = publish(shop, order, prefix)
        shop.start_worker("--pool", pool, concurrency=1)
        worker.kill()
        killed_at = time.time()
        for each, _ in calls:
            shop.ledger.release(each)

        assert_soon(shop, calls, killed_at)
        assert ends(shop, calls) == [[None, "returned"], ["returned"], ["returned"], ["returned"]]
        killed, second = shop.ledger.runs(calls[0][0])
        assert second.recovered
        assert second.token > killed.token
        shop.wait_until_empty()


@pytest.mark.exhaustive
@pytest.mark.parametrize("pool", ["prefork", "solo", "gevent", "eventlet"])
def test_a_living_worker_gets_its_messages_once(open_shop: OpenShop, order: str, pool: str) -> None:
    """The visibility timeout is 3 s here, and kombu itself searches every second."""
    with open_shop(broker_transport_options=FAST_REDELIVERY) as shop:
        for _ in range(2):
            shop.start_worker("--pool", pool, concurrency=1)
        result = shop.ledger.start(pack, order)
        later = pack.apply_async((f"{order} later",), countdown=8)
        started_at = shop.ledger.wait_for_run(order).started_at
        eventually(lambda: time.time() > started_at + 7, "twice the visibility timeout is over")
        shop.ledger.release(order)

        for each in (result, later):
            shop.ledger.wait_for_signal(each.id, "completed")
            names = [received.name for received in shop.ledger.signals(each.id)]
            assert names == ["begun", "completed"]
        assert len(shop.ledger.runs(f"{order} later")) == 1


SHOP = SETTINGS


def test_idempotent_messages_are_renewed_from_their_delivery_on(shop: Shop, order: str) -> None:
    """A worker that is killed before the first renewal must not cost an hour."""
    shop.ledger.hold(order)
    results = [pack.delay(order)]
    first = eventually(lambda: scores(shop).get("shop.pack"), "the message is delivered")
    assert first <= REDELIVER_AFTER
    results.append(open_door.delay(order))
    shop.ledger.wait_for_run(order, 2)

    def is_renewed_twice() -> bool:
        seen.append(scores(shop))
        return len({round(score["shop.pack"] + time.time(), 1) for score in seen}) > 2

    seen: list[dict[str, float]] = []
    eventually(is_renewed_twice)

    assert all(0 < score["shop.pack"] <= REDELIVER_AFTER for score in seen)
    assert all(score["shop.open_door"] > 3500 for score in seen)
    shop.ledger.release(order)
    for result in results:
        result.get(timeout=SOON)


def test_calls_without_protection_are_left_to_the_broker(shop: Shop, order: str) -> None:
    result = shop.ledger.start(pack, order, idempotency_key=False)

    assert scores(shop)["shop.pack"] > 3500
    shop.ledger.release(order)
    result.get(timeout=SOON)


def test_an_acknowledged_message_does_not_come_back(shop: Shop) -> None:
    held: Any = SimpleNamespace(delivery_tag="acknowledged meanwhile")

    with shop.app.connection_for_read() as connection:
        broker = RedisBroker(connection)
        broker.renew([held], 1.0)
        broker.close()

    assert shop.redis.zscore("unacked_index", held.delivery_tag) is None


@pytest.mark.exhaustive
def test_a_message_that_cannot_be_acknowledged_has_no_slot(open_shop: OpenShop, order: str) -> None:
    """With all slots full, a worker takes no more messages and does not notice a lost broker."""
    first, second = f"{order} 1", f"{order} 2"
    settings = {**SETTINGS, **LOST_BROKER, "worker_prefetch_multiplier": 1}
    with (
        RedisServer.start(config={"appendonly": "yes"}) as broker,
        open_shop(**settings, broker_url=broker.url) as shop,
    ):
        worker = shop.start_worker(concurrency=1)
        shop.ledger.hold(first)
        results = [pack.delay(first), pack.delay(second)]
        shop.ledger.wait_for_run(first)
        broker.kill()
        shop.ledger.release(first)
        worker.wait_for_log("Couldn't ack")
        broker.restart()
        for result in results:
            assert result.get(timeout=SOON)["receipt"]
        with broker.client() as client:
            eventually(lambda: not client.exists("unacked"), "the first message is redelivered")
        assert [run.end for run in shop.ledger.runs(first)] == ["returned"]


def test_an_acknowledged_message_takes_no_memory() -> None:
    """Its handle stays until the next renewal of all messages, a third of the seconds later."""
    with (
        RedisServer.start() as server,
        Celery(broker=server.url, set_as_current=False) as app,
        app.connection_for_read() as connection,
        connection.SimpleQueue("celery") as queue,
    ):

        @app.task(base=IdempotentTask)
        def protected() -> None:
            """Never runs."""

        protected.delay()
        held = UnackedMessages(app, None)
        message = queue.get(timeout=SOON)
        try:
            received = request.IdempotentRequest(message, app=app, task=protected)
            assert len(held.new()) == 1
        finally:
            request.received = None
        message.ack()
    gone = ref(message)
    del message, received
    gc.collect()  # kombu keeps its last message in cycles
    assert gone() is None


def test_a_worker_that_is_killed_in_a_search_delays_others_by_seconds() -> None:
    app = Celery(set_as_current=False, broker="redis://")
    shorten_lock(app)
    assert app.conf.broker_transport_options == {"unacked_mutex_expire": 2}


@pytest.mark.exhaustive
def test_the_message_of_a_frozen_child_is_given_up(open_shop: OpenShop, order: str) -> None:
    """Another worker takes over when the lease has expired."""
    with open_shop(**SETTINGS) as shop:
        worker = shop.start_worker(concurrency=1)
        result = shop.ledger.start(pack, order)
        frozen = shop.ledger.wait_for_run(order)
        shop.start_worker(concurrency=1)
        os.kill(frozen.pid, signal.SIGSTOP)
        frozen_at = time.time()
        try:
            winner = shop.ledger.wait_for_run(order, 2)
            name = f"{worker.name()}@here"
            replies = shop.app.control.inspect([name], limit=1, timeout=SOON)
            (lease,) = replies._request("idempotency_leases")[name]
            assert (lease["heartbeat"], lease["pid"]) == ("lost", frozen.pid)
            shop.ledger.release(order)
            receipt = result.get(timeout=SOON)
            # The frozen worker may receive the copy, too, until it has prefetched enough.
            assert winner.started_at - frozen_at < 10 * REDELIVER_AFTER
            assert winner.recovered
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        shop.wait_until_empty()
        assert pack.delay(order).get(timeout=SOON) == receipt
        assert "does not renew its lease" in worker.logs()


CANCEL = {"worker_cancel_long_running_tasks_on_connection_loss": True}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("lose", "settings", "interrupted"),
    [
        pytest.param("SIGQUIT", {}, True, id="cold shutdown"),
        pytest.param("SIGQUIT", {"worker_soft_shutdown_timeout": 1.0}, True, id="soft shutdown"),
        pytest.param("SIGTERM", {}, False, id="warm shutdown"),
        pytest.param("SIGHUP", {}, False, id="SIGHUP"),
        pytest.param("freeze", {}, False, id="main process frozen"),
        pytest.param("cut", LOST_BROKER, False, id="broker lost"),
        pytest.param("cut", {**CANCEL, **LOST_BROKER}, True, id="broker lost, tasks cancelled"),
    ],
)
def test_messages_that_a_worker_loses_run_soon(
    open_shop: OpenShop, order: str, lose: str, settings: dict[str, Any], interrupted: bool
) -> None:
    """They are not renewed any more, so that they run elsewhere or on the worker itself.

    The pool of a frozen main process goes on: what runs there is finished there.
    """
    with (
        RedisServer.start() as broker,
        Proxy(broker.url) as proxy,
        broker.client() as client,
        open_shop(**SETTINGS, **settings, broker_url=proxy.url) as shop,
    ):
        shop.redis, own = client, shop.redis
        worker = shop.start_worker(concurrency=1)
        calls = publish(shop, order)
        (first, result), *others = calls
        shop.start_worker(concurrency=2)
        if lose == "cut":
            proxy.refuse()
            worker.wait_for_log("Connection to broker lost")
            proxy.heal()
        elif lose == "freeze":
            worker.container.process.send_signal(signal.SIGSTOP)
        else:
            worker.kill(lose)
        if interrupted:
            eventually(lambda: shop.ledger.runs(first)[0].end, "it is interrupted")
        if lose == "cut":
            # The worker's one process may receive the others again.
            shop.ledger.release(first)
        lost_at = time.time()
        for each, _ in others:
            shop.ledger.release(each)
        assert_soon(shop, others, lost_at)
        shop.ledger.release(first)
        assert result.get(timeout=SOON)["receipt"]
        if lose == "freeze":
            worker.resume()
        shop.wait_until_empty()
        assert shop.redis.zcard("unacked_index") == 0
        expected = ["SystemExit", "returned"] if interrupted else ["returned"]
        assert ends(shop, calls) == [expected, ["returned"], ["returned"], ["returned"]]
        shop.redis = own


@pytest.mark.parametrize("in_shadow", [False, True])
def test_without_acknowledgements_a_worker_runs(open_shop: OpenShop, in_shadow: bool) -> None:
    options = {"ack_emulation": False}
    with open_shop(broker_transport_options=options, idempotency_shadow=in_shadow) as shop:
        worker = shop.start_worker()

        assert pack.delay("order").get(timeout=SOON)
        assert "queue celery: its messages are not acknowledged" in worker.logs()
