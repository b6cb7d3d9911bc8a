"""``idempotency_redeliver_after``: the messages of a dead worker come back soon, at a visibility
timeout of an hour, and those of a living one do not.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.core.task.receive import request
from celery_idempotent.redelivery.broker import RedisBroker, shorten_lock
from celery_idempotent.redelivery.held import HeldMessages
from tests.conftest import exhaustive_except
from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.harness import FAST_REDELIVERY, LOST_BROKER, Shop
from tests.worker.tasks import open_door, pack

pytestmark = [pytest.mark.slow, pytest.mark.worker]

#: Seconds.
REDELIVER_AFTER = 2.0
#: Beyond the above: between two searches, for a worker to receive the message, and to begin.
SLACK = 5.0

#: kombu's default visibility timeout is an hour.
SETTINGS: dict[str, Any] = {
    "idempotency_redeliver_after": REDELIVER_AFTER,
    "idempotency_lease": REDELIVER_AFTER,
}


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


def publish(shop: Shop, order: str) -> list[tuple[str, Any]]:
    """Publishes four calls, of which the only worker, with one process, runs one.

    Returns:
        Each order and its result: that of the running one, two prefetched ones, and one that waits
        for its ETA.
    """
    orders = [f"{order} {number}" for number in range(4)]
    for each in orders:
        shop.ledger.hold(each)
    results = [pack.delay(orders[0])]
    shop.ledger.wait_for_run(orders[0])
    results += [pack.delay(each) for each in orders[1:3]]
    results.append(pack.apply_async((orders[3],), countdown=4))
    eventually(lambda: shop.redis.zcard("unacked_index") == 4, "the worker has all messages")
    return list(zip(orders, results, strict=True))


@pytest.mark.core
@pytest.mark.parametrize("pool", exhaustive_except(["prefork", "threads"], "prefork"))
def test_all_that_a_killed_worker_had_runs_once_more_elsewhere(
    open_shop: Callable[..., Shop], order: str, pool: str
) -> None:
    with open_shop(**SETTINGS) as shop:
        worker = shop.start_worker("--pool", pool, concurrency=1)
        calls = publish(shop, order)
        shop.start_worker("--pool", pool, concurrency=1)
        worker.kill()
        killed_at = time.time()
        for each, _ in calls:
            shop.ledger.release(each)

        for each, result in calls:
            assert result.get(timeout=SOON)["receipt"]
            run = shop.ledger.runs(each)[-1]
            assert run.started_at - killed_at < REDELIVER_AFTER + SLACK, each
            assert run.task_id == result.id
        ends = [[run.end for run in shop.ledger.runs(each)] for each, _ in calls]
        assert ends == [[None, "returned"], ["returned"], ["returned"], ["returned"]]
        killed, second = shop.ledger.runs(calls[0][0])
        assert second.recovered
        assert second.token > killed.token
        shop.wait_until_empty()


@pytest.mark.exhaustive
class TestLivingWorker:
    """The visibility timeout is 3 s here, and kombu itself searches every second."""

    @pytest.fixture(scope="class")
    @classmethod
    def shared_shop(cls, open_shop: Callable[..., Shop]) -> Iterator[Shop]:
        with open_shop(broker_transport_options=FAST_REDELIVERY) as shop:
            for _ in range(2):
                shop.start_worker(concurrency=1)
            yield shop

    def test_messages_are_delivered_once(self, shop: Shop, order: str) -> None:
        shop.ledger.hold(order)
        result = pack.delay(order)
        later = pack.apply_async((f"{order} later",), countdown=8)
        started_at = shop.ledger.wait_for_run(order).started_at
        eventually(lambda: time.time() > started_at + 7, "twice the visibility timeout is over")
        shop.ledger.release(order)

        for each in (result, later):
            shop.ledger.wait_for_signal(each.id, "completed")
            names = [received.name for received in shop.ledger.signals(each.id)]
            assert names == ["begun", "completed"]
        assert len(shop.ledger.runs(f"{order} later")) == 1

    @pytest.mark.parametrize("pool", ["solo", "gevent", "eventlet"])
    def test_in_other_pools(self, open_shop: Callable[..., Shop], pool: str, order: str) -> None:
        with open_shop(broker_transport_options=FAST_REDELIVERY) as shop:
            for _ in range(2):
                shop.start_worker("--pool", pool, concurrency=1)
            self.test_messages_are_delivered_once(shop, order)


class TestWhatIsRenewed:
    @pytest.fixture(scope="class")
    @classmethod
    def shared_shop(cls, open_shop: Callable[..., Shop]) -> Iterator[Shop]:
        with open_shop(**SETTINGS) as shop:
            shop.start_worker(concurrency=2)
            yield shop

    def test_idempotent_messages_only(self, shop: Shop, order: str) -> None:
        shop.ledger.hold(order)
        results = [task.delay(order) for task in (pack, open_door)]
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

    def test_from_the_moment_of_the_delivery(self, shop: Shop, order: str) -> None:
        """A worker that is killed before the first renewal must not cost an hour."""
        shop.ledger.hold(order)
        result = pack.delay(order)
        first = eventually(lambda: scores(shop).get("shop.pack"), "the message is delivered")

        assert first <= REDELIVER_AFTER
        shop.ledger.release(order)
        result.get(timeout=SOON)

    def test_calls_without_protection_are_left_to_the_broker(self, shop: Shop, order: str) -> None:
        result = shop.ledger.start(pack, order, idempotency_key=False)

        assert scores(shop)["shop.pack"] > 3500
        shop.ledger.release(order)
        result.get(timeout=SOON)

    def test_an_acknowledged_message_does_not_come_back(self, shop: Shop) -> None:
        held: Any = SimpleNamespace(delivery_tag="acknowledged meanwhile")

        with shop.app.connection_for_read() as connection:
            broker = RedisBroker(connection)
            broker.renew([held], 1.0)
            broker.close()

        assert shop.redis.zscore("unacked_index", held.delivery_tag) is None


@pytest.mark.exhaustive
def test_a_message_that_cannot_be_acknowledged_occupies_no_slot(
    open_shop: Callable[..., Shop], order: str
) -> None:
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
        held = HeldMessages(app, None)
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


@pytest.mark.exhaustive
def test_with_priorities_and_a_prefix(open_shop: Callable[..., Shop], order: str) -> None:
    """Messages of all priorities come back, at a visibility timeout of an hour."""
    options = {"global_keyprefix": "shop:", "queue_order_strategy": "priority"}
    with open_shop(**SETTINGS, broker_transport_options=options) as shop:
        worker = shop.start_worker(concurrency=1)
        shop.ledger.hold(order)
        results = [pack.apply_async((order,), priority=6)]
        shop.ledger.wait_for_run(order)
        results += [pack.apply_async((f"{order} {n}",), priority=n) for n in (0, 9)]
        for result in results:
            worker.wait_for_log(f"[{result.id}] received")
        worker.kill()
        killed_at = time.time()
        shop.ledger.release(order)
        shop.start_worker(concurrency=1)

        for result in results:
            assert result.get(timeout=SOON)["receipt"]
        started_at = shop.ledger.runs(order)[-1].started_at
        assert started_at - killed_at < REDELIVER_AFTER + 2 * SLACK


def test_a_worker_that_is_killed_in_a_search_delays_others_by_seconds() -> None:
    app = Celery(set_as_current=False, broker="redis://")
    shorten_lock(app)
    assert app.conf.broker_transport_options == {"unacked_mutex_expire": 2}


class TestFrozenChild:
    """Its message is given up, so that another worker takes over when the lease has expired."""

    @pytest.mark.exhaustive
    def test_another_worker_takes_over(self, open_shop: Callable[..., Shop], order: str) -> None:
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


@pytest.mark.exhaustive
class TestFrozenMainProcess:
    """Its pool goes on: what runs there is finished there, the rest runs elsewhere."""

    def test_every_call_runs_once(self, open_shop: Callable[..., Shop], order: str) -> None:
        with open_shop(**SETTINGS) as shop:
            worker = shop.start_worker(concurrency=1)
            calls = publish(shop, order)
            shop.start_worker(concurrency=1)
            pid = worker.container.process.pid
            os.kill(pid, signal.SIGSTOP)
            frozen_at = time.time()
            for each, _ in calls[1:]:
                shop.ledger.release(each)
            try:
                for each, result in calls[1:]:
                    assert result.get(timeout=SOON)["receipt"]
                    started_at = shop.ledger.runs(each)[0].started_at
                    assert started_at - frozen_at < REDELIVER_AFTER + SLACK
                shop.ledger.release(order + " 0")
                assert calls[0][1].get(timeout=SOON)["receipt"]
            finally:
                os.kill(pid, signal.SIGCONT)
            shop.wait_until_empty()
            for each, _ in calls:
                assert [run.end for run in shop.ledger.runs(each)] == ["returned"]


CUT = "cut"


@pytest.mark.exhaustive
class TestMessagesThatTheWorkerLoses:
    """They are not renewed any more, so that they run soon, elsewhere or on the worker itself."""

    @pytest.mark.parametrize(
        ("lose", "settings", "ends"),
        [
            pytest.param("SIGQUIT", {}, ["SystemExit", "returned"], id="cold shutdown"),
            pytest.param(
                "SIGQUIT",
                {"worker_soft_shutdown_timeout": 1.0},
                ["SystemExit", "returned"],
                id="soft shutdown",
            ),
            pytest.param("SIGTERM", {}, ["returned"], id="warm shutdown"),
            pytest.param("SIGHUP", {}, ["returned"], id="SIGHUP"),
            pytest.param(CUT, LOST_BROKER, ["returned"], id="broker lost"),
            pytest.param(
                CUT,
                {"worker_cancel_long_running_tasks_on_connection_loss": True, **LOST_BROKER},
                ["SystemExit", "returned"],
                id="broker lost, tasks cancelled",
            ),
        ],
    )
    def test_all_run_soon(
        self,
        open_shop: Callable[..., Shop],
        order: str,
        lose: str,
        settings: dict[str, Any],
        ends: list[str],
    ) -> None:
        with (
            RedisServer.start() as broker,
            Proxy(broker.url) as proxy,
            broker.client() as client,
            open_shop(**SETTINGS, **settings, broker_url=proxy.url) as shop,
        ):
            shop.redis, own = client, shop.redis
            worker = shop.start_worker(concurrency=1)
            calls = publish(shop, order)
            shop.start_worker(concurrency=2)
            if lose == CUT:
                proxy.refuse()
                worker.wait_for_log("Connection to broker lost")
                proxy.heal()
            else:
                worker.kill(lose)
            if len(ends) > 1:
                eventually(lambda: shop.ledger.runs(calls[0][0])[0].end, "it is interrupted")
            if lose == CUT:
                # The worker's one process may receive the others again.
                shop.ledger.release(calls[0][0])
            for each, _ in calls[1:]:
                shop.ledger.release(each)
            lost_at = time.time()
            for each, result in calls[1:]:
                assert result.get(timeout=SOON)["receipt"]
                started_at = shop.ledger.runs(each)[-1].started_at
                assert started_at - lost_at < REDELIVER_AFTER + SLACK
            shop.ledger.release(calls[0][0])
            assert calls[0][1].get(timeout=SOON)["receipt"]
            shop.wait_until_empty()
            assert shop.redis.zcard("unacked_index") == 0
            assert [run.end for run in shop.ledger.runs(calls[0][0])] == ends
            for each, _ in calls[1:]:
                assert [run.end for run in shop.ledger.runs(each)] == ["returned"]
            shop.redis = own


@pytest.mark.parametrize("in_shadow", [False, True])
def test_without_acknowledgements_a_worker_runs(
    open_shop: Callable[..., Shop], in_shadow: bool
) -> None:
    options = {"ack_emulation": False}
    with open_shop(broker_transport_options=options, idempotency_shadow=in_shadow) as shop:
        worker = shop.start_worker()

        assert pack.delay("order").get(timeout=SOON)
        assert "queue celery: its messages are not acknowledged" in worker.logs()
