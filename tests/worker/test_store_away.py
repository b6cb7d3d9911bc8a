"""The store is unreachable, but broker and result backend are available."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_idempotent import StoreUnavailableError
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.harness import OpenShop, Shop
from tests.worker.tasks import pack, reserved, strict, unguarded


@pytest.fixture(scope="module")
def shared_shop(open_shop: OpenShop, store: RedisServer) -> Iterator[Shop]:
    with open_shop(idempotency_redis_url=store.url) as shop:
        shop.start_worker(concurrency=2)
        yield shop


@pytest.fixture(autouse=True)
def _restart(store: RedisServer) -> Iterator[None]:
    """Ends the outage of a test, whose calls may then run."""
    yield
    store.restart()


@pytest.mark.exhaustive
def test_publishing_reserves_nothing(shop: Shop, store: RedisServer, order: str) -> None:
    """``idempotency_dedupe_publish``."""
    store.kill()
    results = [reserved.delay(order) for _ in range(2)]
    store.restart()

    assert results[0].id != results[1].id
    receipts = [result.get(timeout=SOON) for result in results]
    assert receipts[0] == receipts[1]
    assert len(shop.ledger.runs(order)) == 1


@pytest.mark.parametrize(
    ("task", "policy"), [(pack, "retry"), (unguarded, "run"), (strict, "raise")]
)
def test_policies_apply_at_begin_and_store_unavailable_is_sent(
    shop: Shop, store: RedisServer, order: str, task: Any, policy: str
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


def test_complete_is_retried_during_the_lease(shop: Shop, store: RedisServer, order: str) -> None:
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


def test_it_is_logged_at_the_start_without_its_password(open_shop: OpenShop) -> None:
    unreachable = "redis://:secret@127.0.0.1:1/0"  # no server listens on this port
    with open_shop(idempotency_redis_url=unreachable) as shop:
        log = shop.start_worker(concurrency=1).logs()

    (line,) = (each for each in log.splitlines() if "idempotency_on_store_error applies" in each)
    assert "ERROR" in line
    assert "cannot be reached" in line
    assert "Traceback" not in log
    assert "secret" not in log
