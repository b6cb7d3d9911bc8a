"""The fencing example: writes of a stale execution are rejected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_idempotent.testing import IsolatedRecords
from celery_idempotent.testing.server import RedisServer
from examples.fencing import tasks
from examples.fencing.tasks import StaleWriteError, app, read, total, write

DAY = "2026-11-21"


@pytest.fixture(autouse=True)
def _eager(
    idempotency_server: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    monkeypatch.setenv("TOTALS_FILE", str(tmp_path / "totals.sqlite"))
    app.conf.update(idempotency_redis_url=idempotency_server.url, task_always_eager=True)
    idempotency_server.client().flushall()
    yield
    app.conf.task_always_eager = False


@pytest.fixture
def lease_is_lost(monkeypatch: pytest.MonkeyPatch, idempotency: IsolatedRecords) -> None:
    """The first execution loses its lease while it computes, and a second one completes."""
    amounts = iter([1, 2])

    def add_up(day: str) -> int:
        amount = next(amounts)
        if amount == 1:
            idempotency.expire_lease(total, day)
            assert total.delay(day).get() == 2
        return amount

    monkeypatch.setattr(tasks, "add_up", add_up)


@pytest.mark.usefixtures("lease_is_lost")
def test_a_write_by_a_stale_execution_is_rejected() -> None:
    total.delay(DAY).get()

    assert read(DAY) == 2


def test_a_lower_token_is_rejected_and_an_equal_one_accepted() -> None:
    write(DAY, 10, token=2)
    write(DAY, 11, token=2)

    with pytest.raises(StaleWriteError, match=DAY):
        write(DAY, 12, token=1)
    assert read(DAY) == 11
