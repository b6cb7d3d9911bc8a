"""The store is unreachable, but broker and result backend are available."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from celery_idempotent import StoreUnavailableError
from celery_idempotent.core.task.publish.put_back import REQUEUE_PAUSE
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.tasks import pack, reserved, short_lease, strict, unguarded, unsendable

pytestmark = pytest.mark.worker


@pytest.fixture(scope="module")
def durable_store() -> Iterator[RedisServer]:
    with RedisServer.start(config={"appendonly": "yes", "appendfsync": "always"}) as store:
        yield store


class Locked:
    """A store for which no one has credentials any more, after `kill`."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._file = Path(os.environ["SHOP_NO_CREDENTIALS"])

    def kill(self) -> None:
        self._file.touch()
        with self._server.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)

    def restart(self) -> None:
        self._file.unlink(missing_ok=True)


@pytest.fixture
def store(
    request: pytest.FixtureRequest, durable_store: RedisServer
) -> Iterator[RedisServer | Locked]:
    store = Locked(durable_store) if getattr(request, "param", "") == "locked" else durable_store
    yield store
    store.restart()


each_outage = pytest.mark.parametrize("store", ["killed", "locked"], indirect=True)


@pytest.fixture(scope="module")
def shared_shop(
    open_shop: Callable[..., Shop],
    durable_store: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Shop]:
    options = {"credential_provider": "tests.worker.shop:Credentials"}
    file = tmp_path_factory.mktemp("credentials") / "none"
    with (
        pytest.MonkeyPatch.context() as patch,
        open_shop(
            idempotency_redis_url=durable_store.url, idempotency_redis_options=options
        ) as shop,
    ):
        patch.setenv("SHOP_NO_CREDENTIALS", str(file))
        shop.start_worker(concurrency=2, SHOP_NO_CREDENTIALS=str(file))
        yield shop


class TestAtPublish:
    """``idempotency_dedupe_publish``."""

    @each_outage
    @pytest.mark.exhaustive
    def test_message_is_published_without_a_reservation(
        self, shop: Shop, store: RedisServer, order: str
    ) -> None:
        store.kill()
        results = [reserved.delay(order) for _ in range(2)]
        store.restart()

        assert results[0].id != results[1].id
        receipts = [result.get(timeout=SOON) for result in results]
        assert receipts[0] == receipts[1]
        assert len(shop.ledger.runs(order)) == 1


class TestAtBegin:
    @each_outage
    @pytest.mark.exhaustive
    def test_retry_requeues_until_the_store_is_available(
        self, shop: Shop, store: RedisServer, order: str
    ) -> None:
        earlier = f"earlier {order}"
        receipt = pack.delay(earlier).get(timeout=SOON)
        store.kill()
        result, duplicate = pack.delay(order), pack.delay(earlier)
        for waiting in (result, duplicate):
            shop.ledger.wait_for_signal(waiting.id, "store_unavailable", number=2)
        assert shop.ledger.runs(order) == []
        assert result.state == "PENDING"
        store.restart()

        assert result.get(timeout=SOON)["receipt"]
        assert duplicate.get(timeout=SOON) == receipt
        assert len(shop.ledger.runs(order)) == len(shop.ledger.runs(earlier)) == 1

    @pytest.mark.parametrize(
        ("task", "policy"),
        [(pack, "retry"), (unguarded, "run"), (strict, "raise")],
        ids=["retry", "run", "raise"],
    )
    def test_policies_apply_and_store_unavailable_is_sent(
        self, shop: Shop, store: RedisServer, order: str, task: object, policy: str
    ) -> None:
        store.kill()
        result = task.delay(order)

        received = shop.ledger.wait_for_signal(result.id, "store_unavailable")
        assert received.sender == task.name
        error, message = received.details.pop("error")
        assert error == "StoreUnavailableError"
        assert "Redis cannot be reached" in message
        assert received.details.pop("key").startswith(f"{task.name}:")
        assert received.details == {"task_id": result.id, "label": "", "policy": policy}
        if task is strict:
            with pytest.raises(StoreUnavailableError):
                result.get(timeout=SOON)
        if task is unguarded:
            assert task.delay(order).get(timeout=SOON) != result.get(timeout=SOON)
        protected = [run.protected for run in shop.ledger.runs(order)]
        assert protected == ([False, False] if task is unguarded else [])

    @pytest.mark.exhaustive
    def test_message_that_cannot_be_republished_is_redelivered_slowly(
        self, shop: Shop, store: RedisServer, order: str
    ) -> None:
        store.kill()
        started_at = time.monotonic()
        result = unsendable.delay(order)
        shop.ledger.wait_for_signal(result.id, "store_unavailable", number=3)
        assert time.monotonic() - started_at > 2 * 0.75 * REQUEUE_PAUSE
        store.restart()

        assert result.get(timeout=SOON)["receipt"]
        assert len(shop.ledger.runs(order)) == 1

    @pytest.mark.exhaustive
    def test_outage_is_logged_once_per_process(
        self, shop: Shop, store: RedisServer, order: str
    ) -> None:
        (worker,) = shop.workers
        worker.children_run(pack, shop.ledger)  # the outage of an earlier test has ended for each
        worker.new_logs()
        store.kill()
        results = [pack.delay(f"{order}-{number}") for number in range(20)]
        for result in results:
            shop.ledger.wait_for_signal(result.id, "store_unavailable")
        store.restart()
        for result in results:
            assert result.get(timeout=SOON)

        lines = worker.new_logs().splitlines()
        errors = [line for line in lines if "ERROR" in line and "cannot begin" in line]
        assert not [line for line in lines if "is requeued" in line], "one line stands for all"
        assert 1 <= len(errors) <= 2, "one for each process of the pool"
        back = [line for line in lines if "is back after" in line]
        assert 1 <= len(back) <= 2


class TestAtComplete:
    @each_outage
    def test_complete_is_retried_during_the_lease(
        self, shop: Shop, store: RedisServer, order: str
    ) -> None:
        result = shop.ledger.start(pack, order)
        store.kill()
        shop.ledger.release(order)
        eventually(lambda: shop.ledger.runs(order)[0].end, "the body returns")
        assert not result.ready()
        store.restart()

        receipt = result.get(timeout=SOON)
        shop.ledger.wait_for_signal(result.id, "completed")
        names = [signal.name for signal in shop.ledger.signals(result.id)]
        # The first begin may fail if the breaker of this process is still open.
        assert names[names.index("begun") :] == ["begun", "completed"]
        assert pack.delay(order).get(timeout=SOON) == receipt


@pytest.mark.exhaustive
def test_hung_stores_do_not_cost_another_its_lease(
    open_shop: Callable[..., Shop], order: str
) -> None:
    with ExitStack() as stack:
        others = [stack.enter_context(RedisServer.start(config={})) for _ in range(6)]
        shop = stack.enter_context(open_shop())
        shop.start_worker(
            *("--pool", "threads", "--queues", "first"),
            concurrency=len(others) + 1,
            SHOP_OTHER_STORES=" ".join(other.url for other in others),
        )
        shop.ledger.hold(order)
        for number in range(len(others)):
            shop.app.send_task(f"shop.elsewhere_{number}", (order,), queue="first")
        result = short_lease.apply_async((order,), queue="first")
        shop.ledger.wait_for_run(order, len(others) + 1)
        for other in others:
            other.pause()
        shop.start_worker(concurrency=1)
        duplicate = short_lease.delay(order)

        def conflicts() -> int:
            assert len(shop.ledger.runs(order)) == len(others) + 1
            return len(shop.ledger.signals(duplicate.id, "conflicted"))

        eventually(lambda: conflicts() >= 5, "the duplicate is put back for three leases")
        for other in others:
            other.resume()
        shop.ledger.release(order)
        assert duplicate.get(timeout=SOON) == result.get(timeout=SOON)


def lines_about_the_store(log: str) -> list[str]:
    return [line for line in log.splitlines() if "idempotency_on_store_error applies" in line]


class TestAtTheStart:
    def test_it_is_logged_without_its_password(self, open_shop: Callable[..., Shop]) -> None:
        unreachable = "redis://:secret@127.0.0.1:1/0"  # no server listens on this port
        with open_shop(idempotency_redis_url=unreachable) as shop:
            log = shop.start_worker(concurrency=1).logs()

        (line,) = lines_about_the_store(log)
        assert "ERROR" in line
        assert "cannot be reached" in line
        assert "Traceback" not in log
        assert "secret" not in log

    @pytest.mark.exhaustive
    def test_a_reachable_store_is_not_logged(self, open_shop: Callable[..., Shop]) -> None:
        with open_shop() as shop:
            assert lines_about_the_store(shop.start_worker(concurrency=1).logs()) == []
