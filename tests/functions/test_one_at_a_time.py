"""Functions and blocks with ``until="finished"``: one at a time, and again after the end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import Decision, Idempotency
from celery_idempotent.errors import SettingsError
from tests.functions.shop import Shop
from tests.waiting import SOON


def test_a_call_after_the_end_runs(shop: Shop, key: str) -> None:
    charge = shop.idempotent(lambda order: {"charged": order}, until="finished")

    assert [charge(key), charge(key)] == [{"charged": key}] * 2
    assert shop.runs == [key, key]


def test_a_call_during_a_run_waits_for_its_turn(idem: Idempotency, key: str) -> None:
    running, go_on, runs = threading.Event(), threading.Event(), []

    @idem.idempotent(key="{order}", until="finished", wait_timeout=SOON)
    def charge(order: str, amount: int) -> int:
        runs.append(f"start {amount}")
        running.set()
        assert go_on.wait(SOON)
        runs.append(f"end {amount}")
        return amount

    results: list[int] = []
    threads = [
        threading.Thread(target=lambda n=amount: results.append(charge(key, n)))
        for amount in (1, 2)
    ]
    threads[0].start()
    assert running.wait(SOON)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(SOON)

    assert sorted(results) == [1, 2], "each call has its own arguments and its own result"
    assert runs == ["start 1", "end 1", "start 2", "end 2"]


def test_an_error_frees_the_turn(shop: Shop, key: str) -> None:
    def decline(order: str) -> None:
        raise ValueError(order)

    charge = shop.idempotent(decline, until="finished")
    for _ in range(2):
        with pytest.raises(ValueError, match=key):
            charge(key)

    assert len(shop.runs) == 2


def test_a_block_is_refused_while_another_runs(idem: Idempotency, key: str) -> None:
    how: dict[str, Any] = {"until": "finished", "on_conflict": "raise"}
    with idem.execution(key, **how) as first, idem.execution(key, **how) as duplicate:
        assert (first.decision, duplicate.decision) == (Decision.RUN, Decision.CONFLICT)
        first.complete(1)
    with idem.execution(key, **how) as second:
        assert second.decision is Decision.RUN


def test_bursts_collapse_at_publishing_only(idem: Idempotency) -> None:
    with pytest.raises(SettingsError, match="until must be 'expired' or 'finished' outside tasks"):
        idem.idempotent(key="{order}", until="started")(lambda order: None)


def test_the_option_of_an_app_is_not_that_of_its_functions() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(idempotency_until="started", idempotency_redis_url="redis://localhost")

    assert Idempotency(app).settings.until == "expired"
