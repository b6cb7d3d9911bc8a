"""Idempotent functions, blocking and async."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import (
    ConflictError,
    Decision,
    Idempotency,
    KeyReusedError,
    StoreUnavailableError,
)
from celery_idempotent.errors import SettingsError
from tests.functions.conftest import Calls, Shop
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON


class Declined(Exception):
    pass


def decline(order: str) -> None:
    raise Declined("card 4711", 7)


class TestOutcomes:
    def test_a_duplicate_gets_the_first_result(self, shop: Shop, key: str) -> None:
        charge = shop.idempotent(lambda order: {"charged": order})

        assert charge(key, amount=999) == {"charged": key}
        assert charge(key, amount=999) == {"charged": key}
        assert shop.runs == [key]

    def test_an_error_releases_the_key(self, shop: Shop, key: str) -> None:
        charge = shop.idempotent(decline)

        for _ in range(2):
            with pytest.raises(Declined):
                charge(key)
        assert len(shop.runs) == 2
        assert shop.state(key) is None

    def test_an_error_of_replay_errors_is_raised_again(self, shop: Shop, key: str) -> None:
        charge = shop.idempotent(decline, replay_errors=(Declined,))

        for _ in range(2):
            with pytest.raises(Declined) as caught:
                charge(key)
            assert caught.value.args == ("card 4711", 7)
        assert len(shop.runs) == 1

    def test_the_same_key_with_other_arguments_is_rejected(self, shop: Shop, key: str) -> None:
        charge = shop.idempotent(lambda order: 1)
        charge(key, amount=1)

        with pytest.raises(KeyReusedError):
            charge(key, amount=2)

    def test_a_disabled_function_runs_each_time(self, shop: Shop, key: str) -> None:
        charge = shop.idempotent(lambda order: 1, enabled=False)
        charge(key)
        charge(key)

        assert len(shop.runs) == 2

    def test_code_that_has_not_run_releases_the_key(self, shop: Shop, key: str) -> None:
        """A plain wrapper hides that it wraps a coroutine function or a generator function."""
        for hidden in (asyncio.Future(loop=asyncio.new_event_loop()), (each for each in [1])):
            with pytest.raises(SettingsError, match="whose code has not run"):
                shop.idempotent(lambda order, value=hidden: value, store_result=False)(key)
            assert shop.state(key) is None

    def test_a_disabled_function_is_no_part_of_its_caller(self, shop: Shop, key: str) -> None:
        """Its steps would be taken for those of the caller."""
        with shop.idem.execution(key):
            charge = shop.idempotent(lambda order: shop.idem.current.protected, enabled=False)
            assert charge(key) is False

    def test_system_exit_releases_the_key(self, shop: Shop, key: str) -> None:
        def exit_process(order: str) -> None:
            raise SystemExit(3)

        with pytest.raises(SystemExit):
            shop.idempotent(exit_process)(key)
        assert shop.state(key) is None

    def test_stop_iteration_releases_the_key(self, idem: Idempotency) -> None:
        @idem.idempotent(name="shop.next")
        def first_item(items: list[int]) -> int:
            return next(iter(items))

        with pytest.raises(StopIteration):
            first_item([])
        assert first_item([1]) == 1


class TestConflicts:
    def duplicate(self, shop: Shop, **options: Any) -> Any:
        """Returns the function of another process that has the records of `shop`."""
        settings = shop.idem.settings
        other = Idempotency(settings.redis_url, key_prefix=settings.key_prefix)
        decorate = other.idempotent(key="order:{order}", name="shop.charge", **options)
        return decorate(lambda order, amount=0: None)

    def test_the_policy_raise_does_not_wait(self, shop: Shop, key: str) -> None:
        def call_again(order: str) -> None:
            with pytest.raises(ConflictError, match="is held by"):
                call_duplicate(order)

        def call_duplicate(order: str) -> Any:
            return self.duplicate(shop, on_conflict="raise")(order)

        shop.idempotent(call_again)(key)

        assert shop.runs == [key]

    def test_the_policy_wait_ends_after_wait_timeout(self, shop: Shop, key: str) -> None:
        def call_again(order: str) -> float:
            duplicate = self.duplicate(shop, wait_timeout=0.2)
            started_at = time.monotonic()
            with pytest.raises(ConflictError):
                duplicate(order)
            return time.monotonic() - started_at

        assert 0.1 <= shop.idempotent(call_again)(key) < 2


class TestStoreUnavailable:
    def test_the_default_is_raise_and_run_runs_unprotected(self, calls: Calls) -> None:
        idem = Idempotency("redis://127.0.0.1:1", redis_timeout=0.2)

        def charge(order: str) -> bool:
            return idem.current.protected

        with pytest.raises(StoreUnavailableError):
            calls.function(idem, charge)("1")
        assert calls.function(idem, charge, name="run", on_store_error="run")("1") is False

    @pytest.mark.parametrize("warm_up", [True, False], ids=["connected", "connecting"])
    def test_a_server_that_does_not_reply_is_unavailable_after_the_timeout(
        self, calls: Calls, warm_up: bool
    ) -> None:
        with RedisServer.start(config={}) as server:
            idem = Idempotency(server.url, redis_timeout=0.5)
            charge = calls.function(idem, lambda order: order)
            if warm_up:
                charge("1")
            server.pause()
            resume = threading.Timer(20, server.resume)
            resume.start()
            try:
                with pytest.raises(StoreUnavailableError):
                    charge("2")
            finally:
                resume.cancel()
                server.resume()
                calls.close(idem)


def test_a_call_after_the_end_runs(shop: Shop, key: str) -> None:
    charge = shop.idempotent(lambda order: {"charged": order}, until="finished")

    assert [charge(key), charge(key)] == [{"charged": key}] * 2
    assert shop.runs == [key, key]


def test_a_call_during_a_run_waits_for_its_turn(idem: Idempotency, key: str) -> None:
    running, go_on, runs = threading.Event(), threading.Event(), []

    @idem.idempotent(name="charge", key="{order}", until="finished", wait_timeout=SOON)
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


def test_a_block_is_refused_while_another_runs(idem: Idempotency, key: str) -> None:
    how: dict[str, Any] = {"until": "finished", "on_conflict": "raise"}
    with idem.execution(key, **how) as first, idem.execution(key, **how) as duplicate:
        assert (first.decision, duplicate.decision) == (Decision.RUN, Decision.CONFLICT)
        first.complete(1)
    with idem.execution(key, **how) as second:
        assert second.decision is Decision.RUN


def test_bursts_collapse_at_publishing_only(idem: Idempotency) -> None:
    with pytest.raises(SettingsError, match="until must be 'expired' or 'finished' outside tasks"):
        idem.idempotent(name="charge", until="started")(lambda order: None)


def test_the_option_of_an_app_is_not_that_of_its_functions() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(idempotency_until="started", idempotency_redis_url="redis://localhost")

    assert Idempotency(app).settings.until == "expired"
