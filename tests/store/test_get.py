"""get: a record is read with its expiry."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from celery_idempotent.core.key import Key
from celery_idempotent.core.record import State
from celery_idempotent.core.store import run_sync
from tests.store.deployments import Site
from tests.store.record_harness import (
    FIRST,
    LEASE_MS,
    RETENTION_MS,
    WORKER,
    RecordHarness,
    store_at,
)

pytestmark = pytest.mark.core

MOMENT = timedelta(seconds=2)


def server_time(harness: RecordHarness) -> datetime:
    return datetime.fromtimestamp(harness.now_ms() / 1000, tz=timezone.utc)


def test_a_running_execution_is_read_with_its_times(harness: RecordHarness) -> None:
    begun = harness.started()

    record = run_sync(harness.store.get(harness.key))

    assert (record.state, record.task, record.key) == (
        State.STARTED,
        "shop.charge",
        str(harness.key),
    )
    assert (record.task_id, record.worker) == (FIRST, WORKER)
    assert (record.token, record.attempt) == (begun.token, 1)
    now = server_time(harness)
    assert record.started_at is not None
    assert record.deadline is not None
    assert record.expires_at is not None
    assert abs(record.started_at - now) < MOMENT
    assert abs(record.deadline - record.started_at - timedelta(milliseconds=LEASE_MS)) < MOMENT
    kept = timedelta(milliseconds=LEASE_MS + RETENTION_MS)
    assert abs(record.expires_at - record.started_at - kept) < MOMENT
    assert record.result is None


def test_a_record_without_an_expiry_can_be_read(harness: RecordHarness) -> None:
    harness.completed()
    harness.client.persist(harness.name)

    assert run_sync(harness.store.get(harness.key)).expires_at is None
    harness.forget()


def test_the_name_in_redis_is_prefix_task_and_digest(harness: RecordHarness) -> None:
    odd = Key("shop {1}: ä", "digest")

    assert harness.name == "idem:shop.charge:PN0MlSPt3FmEwTzQ5dHvBQ"
    assert harness.store.name(odd) == "idem:shop%20%7B1%7D%3A%20%C3%A4:digest"


def test_prefixes_keep_stores_apart(harness: RecordHarness, site: Site) -> None:
    other = RecordHarness(store_at(**site.how, prefix="other"), harness.client)
    harness.completed()

    assert run_sync(other.store.get(harness.key)) is None
    assert other.begin().case == "begun"
