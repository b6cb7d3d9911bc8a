"""The index finds records by all that a page shows of them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from celery_idempotent.dashboard import index as module
from celery_idempotent.dashboard.index import Query, RecordIndex
from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.operations.calls import formatting
from tests.monitoring.conftest import Shop, copy
from tests.servers.redis_server import RedisServer


@pytest.fixture
def index(shop: Shop) -> Iterator[RecordIndex]:
    """With an outcome, an error, a running and an unreadable record."""
    shop.charge.apply((1, 999), task_id="first-charge")
    time.sleep(0.002)  # records are sorted by milliseconds
    shop.charge.apply((2, 13))
    time.sleep(0.002)
    shop.begin(shop.pack, 1, attempt=2)
    shop.client.set(f"idem:shop.tidy:{'x' * 22}", b"damaged")
    with shop.index() as index:
        yield index


def found(index: RecordIndex, limit: int = 50, offset: int = 0, **query: str) -> list[str]:
    views = index.page(Query(**query), limit, offset)
    return [f"{view.key.task} {view.state}" for view in views]


CHARGED, FAILED = "shop.charge COMPLETED", "shop.charge FAILED"
PACKING, DAMAGED = "shop.pack STARTED", "shop.tidy CORRUPT"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [PACKING, FAILED, CHARGED, DAMAGED]),
        ({"sort": "since"}, [DAMAGED, CHARGED, FAILED, PACKING]),
        ({"sort": "-attempt"}, [PACKING]),
        ({"sort": "-task"}, [DAMAGED]),
        ({"sort": "state"}, [PACKING]),
        ({"state": "CORRUPT"}, [DAMAGED]),
        ({"state": "FAILED", "task": "charge"}, [FAILED]),
        ({"task": "PACK"}, [PACKING]),
        ({"text": "first-charge"}, [CHARGED]),
        ({"text": "x" * 22}, [DAMAGED]),
        ({"text": f"shop.tidy:{'x' * 22}"}, [DAMAGED]),
        ({"text": "here/4711"}, [PACKING]),
        ({"text": "%"}, []),
        ({"older_than": "1h"}, [DAMAGED]),
    ],
    ids=str,
)
def test_records_are_found(index: RecordIndex, query: dict[str, str], expected: list[str]) -> None:
    rows = found(index, **query)

    assert rows[: len(expected)] == expected
    assert bool(rows) == bool(expected)
    assert found(index, 3, **query) + found(index, 3, 3, **query) == rows


def test_a_poisoned_call_has_no_run_time(shop: Shop) -> None:
    shop.begin(shop.charge, 1, 999, lease_ms=0, attempt=5)
    shop.charge.apply((1, 999))
    with shop.index() as index:
        totals = index.totals()["shop.charge"]
        (view,) = index.page(Query(state="FAILED"), 1)

    assert (totals.states, totals.quantile(0.5)) == ({"FAILED": 1}, None)
    assert view.record is not None
    assert formatting.run_time(view.record) == ""


def test_a_page_shows_records_as_they_are_now(shop: Shop, index: RecordIndex) -> None:
    shop.charge.idempotency_forget(1, 999)
    shop.charge.apply((2, 13))

    assert found(index, task="charge") == [FAILED]
    shop.pack.idempotency_forget(1, force=True)
    assert found(index, state="STARTED") == []


def test_what_is_gone_leaves_with_the_next_pass(shop: Shop, index: RecordIndex) -> None:
    assert index.totals()["shop.charge"].states == {"COMPLETED": 1, "FAILED": 1}
    shop.client.flushdb()
    index.advance(60)
    index._totals = 0.0, {}

    assert index.totals() == {}


def test_a_pass_goes_on_where_it_has_ended(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    copy(shop, 2_000)
    index = RecordIndex(shop.stores)
    rounds = 0
    while index.finished_at is None:
        index.advance(0)
        rounds += 1

    assert rounds > 2
    assert index.totals()["shop.charge"].states == {"COMPLETED": 2_001}

    monkeypatch.setattr(module, "MAX_RECORDS", 1_000)
    index.advance(60)
    assert index.full
    index.close()


def test_an_outage_ends_a_pass_and_the_next_one_begins(
    shop: Shop, index: RecordIndex, server: RedisServer
) -> None:
    server.kill()
    with pytest.raises(StoreUnavailableError):
        index.advance(60)
    server.restart()

    shop.charge.apply((7, 999))
    index.advance(60)
    assert len(found(index)) == 1, "and what the server has lost is gone"
