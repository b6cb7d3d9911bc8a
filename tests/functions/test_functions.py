"""Idempotent functions, blocking and async."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import ConflictError, Decision, Idempotency
from celery_idempotent.errors import KeyReusedError, SettingsError, StoreUnavailableError
from tests.functions.conftest import Calls
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON


class Declined(Exception):
    pass


def decline(order: str) -> None:
    raise Declined("card 4711", 7)


class TestOutcomes:
    def test_a_duplicate_gets_the_first_result(self, calls: Calls, key: str) -> None:
        charge = calls.function(lambda order: {"charged": order})

        assert charge(key, amount=999) == {"charged": key}
        assert charge(key, amount=999) == {"charged": key}
        assert calls.runs == [key]

    @pytest.mark.parametrize("error", [Declined, SystemExit])
    def test_an_error_releases_the_key(self, calls: Calls, key: str, error: Any) -> None:
        def fail(order: str) -> None:
            raise error

        charge = calls.function(fail)

        for _ in range(2):
            with pytest.raises(error):
                charge(key)
        assert len(calls.runs) == 2
        assert calls.states() == []

    def test_an_error_of_replay_errors_is_raised_again(self, calls: Calls, key: str) -> None:
        charge = calls.function(decline, replay_errors=(Declined,))

        for _ in range(2):
            with pytest.raises(Declined) as caught:
                charge(key)
            assert caught.value.args == ("card 4711", 7)
        assert len(calls.runs) == 1

    def test_the_same_key_with_other_arguments_is_rejected(self, calls: Calls, key: str) -> None:
        charge = calls.function(lambda order: "of the owner")
        charge(key, amount=1)

        with pytest.raises(KeyReusedError) as caught:
            charge(key, amount=2)
        assert "of the owner" not in str(caught.value)
        assert charge(key, amount=1) == "of the owner"

    def test_code_that_has_not_run_releases_the_key(self, calls: Calls, key: str) -> None:
        """A plain wrapper hides that it wraps a coroutine function or a generator function."""
        for hidden in (asyncio.Future(loop=asyncio.new_event_loop()), (each for each in [1])):
            with pytest.raises(SettingsError, match="whose code has not run"):
                calls.function(lambda order, value=hidden: value, store_result=False)(key)
            assert calls.states() == []

    def test_a_disabled_function_runs_each_time(self, calls: Calls, key: str) -> None:
        """It is no part of its caller: its steps would be taken for those of the caller."""
        with calls.idem.execution(key):
            charge = calls.function(lambda order: calls.idem.current.protected, enabled=False)
            assert [charge(key), charge(key)] == [False, False]

        assert len(calls.runs) == 2

    def test_stop_iteration_releases_the_key(self, idem: Idempotency) -> None:
        @idem.idempotent(name="shop.next")
        def first_item(items: list[int]) -> int:
            return next(iter(items))

        with pytest.raises(StopIteration):
            first_item([])
        assert first_item([1]) == 1


class TestConflicts:
    def duplicate(self, calls: Calls, **options: Any) -> Any:
        """Returns the function of another process that has the records of `shop`."""
        settings = calls.idem.settings
        other = Idempotency(settings.redis_url, key_prefix=settings.key_prefix)
        decorate = other.idempotent(key="{order}", name="shop.charge", **options)
        return decorate(lambda order, amount=0: None)

    def test_the_policy_raise_does_not_wait(self, calls: Calls, key: str) -> None:
        def call_again(order: str) -> None:
            with pytest.raises(ConflictError, match="is held by"):
                call_duplicate(order)

        def call_duplicate(order: str) -> Any:
            return self.duplicate(calls, on_conflict="raise")(order)

        calls.function(call_again)(key)

        assert calls.runs == [key]

    def test_the_policy_wait_ends_after_wait_timeout(self, calls: Calls, key: str) -> None:
        def call_again(order: str) -> float:
            duplicate = self.duplicate(calls, wait_timeout=0.2)
            started_at = time.monotonic()
            with pytest.raises(ConflictError):
                duplicate(order)
            return time.monotonic() - started_at

        assert 0.1 <= calls.function(call_again)(key) < 2


class TestStoreUnavailable:
    def test_the_default_is_raise_and_run_runs_unprotected(self, calls: Calls) -> None:
        calls.idem = idem = Idempotency("redis://127.0.0.1:1", redis_timeout=0.2)

        with pytest.raises(StoreUnavailableError):
            calls.function(lambda order: order)("1")
        run = calls.function(lambda order: idem.current.protected, on_store_error="run", name="run")
        assert run("1") is False

    @pytest.mark.parametrize("warm_up", [True, False], ids=["connected", "connecting"])
    def test_a_silent_server_is_unavailable_in_time(self, calls: Calls, warm_up: bool) -> None:
        with RedisServer.start(config={}) as server:
            calls.idem = Idempotency(server.url, redis_timeout=0.5)
            charge = calls.function(lambda order: order)
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
                calls.close()


def test_a_call_after_the_end_runs(calls: Calls, key: str) -> None:
    charge = calls.function(lambda order: {"charged": order}, until="finished")

    assert [charge(key), charge(key)] == [{"charged": key}] * 2
    assert calls.runs == [key, key]


def test_a_call_during_a_run_waits_for_its_turn(idem: Idempotency, key: str) -> None:
    running, go_on, runs = threading.Event(), threading.Event(), []

    @idem.idempotent(name="charge", key="{order}", until="finished", wait_timeout=SOON)
    def charge(order: str, amount: int) -> int:
        runs.append(f"start {amount}")
        running.set()
        assert go_on.wait(SOON)
        runs.append(f"end {amount}")
        return amount

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(charge, key, 1)
        assert running.wait(SOON)
        second = pool.submit(charge, key, 2)
        go_on.set()

    assert (first.result(), second.result()) == (1, 2), "each has its own arguments and result"
    assert runs == ["start 1", "end 1", "start 2", "end 2"]


def test_a_block_is_refused_while_another_runs(idem: Idempotency, key: str) -> None:
    how: dict[str, Any] = {"until": "finished", "on_conflict": "raise"}
    with idem.execution(key, **how) as first, idem.execution(key, **how) as duplicate:
        assert (first.decision, duplicate.decision) == (Decision.RUN, Decision.CONFLICT)
        first.complete(1)
    with idem.execution(key, **how) as second:
        assert second.decision is Decision.RUN


def test_the_option_of_an_app_is_not_that_of_its_functions() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(idempotency_until="started", idempotency_redis_url="redis://localhost")

    assert Idempotency(app).settings.until == "expired"
