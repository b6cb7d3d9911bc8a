"""Functions behind the gate, plain and async: the same promises for both."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from celery import Celery

from celery_idempotent import (
    ConflictError,
    Idempotency,
    KeyReusedError,
    KeyRuleError,
    LeaseLostError,
    ResultNotStoredError,
    State,
    StoreUnavailableError,
)
from celery_idempotent.errors import SettingsError
from celery_idempotent.lease.asyncio_heartbeat import asyncio_heartbeat
from celery_idempotent.lease.heartbeat import heartbeat
from celery_idempotent.lease.lease import Lease
from celery_idempotent.store.async_record_store import AsyncRecordStore
from celery_idempotent.store.commands import Extension
from celery_idempotent.testing.server import RedisServer
from tests.functions.conftest import LEASE
from tests.waiting import eventually

Run = Callable[[Coroutine[Any, Any, Any]], Any]
CALLERS = 50
WAIT_OR_RAISE = "must be 'wait' or 'raise' outside tasks"
RAISE_OR_RUN = "must be 'raise' or 'run' outside tasks"


class Declined(Exception):
    pass


class Shop:
    """The same function in both worlds, called alike."""

    def __init__(self, idem: Idempotency, run: Run, kind: str) -> None:
        self.idem = idem
        self.kind = kind
        self.runs: list[Any] = []
        self._run = run

    def behind(self, body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`body` behind the gate."""
        options = {"key": "order:{order}", "name": "shop.charge", **options}
        if self.kind == "plain":

            def charge(order: str, amount: int = 0) -> Any:
                self.runs.append(order)
                return body(order)

            return self.idem.idempotent(**options)(charge)

        async def acharge(order: str, amount: int = 0) -> Any:
            self.runs.append(order)
            await asyncio.sleep(0)
            return body(order)

        app_tasks = self.idem.idempotent(**options)(acharge)
        return lambda *args, **kwargs: self._run(app_tasks(*args, **kwargs))

    def state(self, order: str) -> State | None:
        key = self.idem.idempotent(key="order:{order}", name="shop.charge")(
            lambda order, amount=0: None
        ).idempotency_key_of(order)
        record = self.idem.executor.store.get(key)
        return record and record.state


@pytest.fixture(params=["plain", "async"])
def shop(request: pytest.FixtureRequest, idem: Idempotency, run: Run) -> Shop:
    return Shop(idem, run, request.param)


def decline(order: str) -> None:
    raise Declined("card 4711", 7)


class TestOutcomes:
    def test_a_duplicate_gets_the_first_result(self, shop: Shop, key: str) -> None:
        charge = shop.behind(lambda order: {"charged": order})

        assert charge(key, amount=999) == {"charged": key}
        assert charge(key, amount=999) == {"charged": key}
        assert shop.runs == [key]

    @pytest.mark.parametrize("value", [None, 0, "", [], False])
    def test_an_empty_result_is_one(self, shop: Shop, key: str, value: Any) -> None:
        charge = shop.behind(lambda order: value)

        assert [charge(key), charge(key)] == [value, value]
        assert len(shop.runs) == 1

    def test_an_error_gives_the_key_back(self, shop: Shop, key: str) -> None:
        charge = shop.behind(decline)

        for _ in range(2):
            with pytest.raises(Declined):
                charge(key)
        assert len(shop.runs) == 2
        assert shop.state(key) is None

    def test_an_error_that_ends_the_key_is_raised_again(self, shop: Shop, key: str) -> None:
        charge = shop.behind(decline, replay_errors=(Declined,))

        for _ in range(2):
            with pytest.raises(Declined) as caught:
                charge(key)
            assert caught.value.args == ("card 4711", 7)
        assert len(shop.runs) == 1

    def test_other_arguments_under_the_key_are_refused(self, shop: Shop, key: str) -> None:
        charge = shop.behind(lambda order: 1)
        charge(key, amount=1)

        with pytest.raises(KeyReusedError):
            charge(key, amount=2)

    def test_a_result_that_is_not_wanted_is_not_kept(self, shop: Shop, key: str) -> None:
        charge = shop.behind(lambda order: 1, store_result=False)
        charge(key)

        with pytest.raises(ResultNotStoredError):
            charge(key)

    def test_arguments_that_give_no_key_are_refused(self, shop: Shop) -> None:
        charge = shop.behind(lambda order: 1, key=None)

        with pytest.raises(KeyRuleError):
            charge(object())

    def test_one_that_is_switched_off_runs_each_time(self, shop: Shop, key: str) -> None:
        charge = shop.behind(lambda order: 1, enabled=False)
        charge(key)
        charge(key)

        assert len(shop.runs) == 2

    def test_an_exit_gives_the_key_back(self, shop: Shop, key: str) -> None:
        def leave(order: str) -> None:
            raise SystemExit(3)

        with pytest.raises(SystemExit):
            shop.behind(leave)(key)
        assert shop.state(key) is None

    def test_the_end_of_an_iteration_is_an_error_like_any_other(self, idem: Idempotency) -> None:
        @idem.idempotent(name="shop.next")
        def first(of: list[int]) -> int:
            return next(iter(of))

        with pytest.raises(StopIteration):
            first([])
        assert first([1]) == 1


class TestConflicts:
    def test_raise_does_not_wait(self, shop: Shop, key: str) -> None:
        def call_again(order: str) -> None:
            with pytest.raises(ConflictError, match="is held by"):
                other(order)

        def other(order: str) -> Any:
            again = shop.idem.idempotent(
                key="order:{order}", name="shop.charge", on_conflict="raise"
            )(lambda order, amount=0: None)
            return again(order)

        shop.behind(call_again)(key)

        assert shop.runs == [key]

    def test_wait_waits_so_long_and_no_longer(self, shop: Shop, key: str) -> None:
        def call_again(order: str) -> float:
            again = shop.idem.idempotent(key="order:{order}", name="shop.charge", wait_timeout=0.2)(
                lambda order, amount=0: None
            )
            began = time.monotonic()
            with pytest.raises(ConflictError):
                again(order)
            return time.monotonic() - began

        assert 0.1 <= shop.behind(call_again)(key) < 2


class TestSingleFlight:
    """50 callers on one key: one execution, one answer for all."""

    def test_of_threads(self, idem: Idempotency, key: str) -> None:
        runs = []

        @idem.idempotent(key="{order}")
        def charge(order: str) -> str:
            runs.append(order)
            time.sleep(0.3)
            return f"receipt {len(runs)}"

        answers: list[str] = []
        threads = [
            threading.Thread(target=lambda: answers.append(charge(key))) for _ in range(CALLERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(runs) == 1
        assert answers == ["receipt 1"] * CALLERS

    def test_of_tasks_on_one_event_loop(self, idem: Idempotency, run: Run, key: str) -> None:
        runs = []

        @idem.idempotent(key="{order}")
        async def charge(order: str) -> str:
            runs.append(order)
            await asyncio.sleep(0.3)
            return f"receipt {len(runs)}"

        async def all_of_them() -> list[str]:
            return await asyncio.gather(*(charge(key) for _ in range(CALLERS)))

        assert run(all_of_them()) == ["receipt 1"] * CALLERS
        assert len(runs) == 1

    def test_of_processes(
        self, idem: Idempotency, server: RedisServer, client: redis.Redis, key: str
    ) -> None:
        # Forks, mostly: fifty starts of Python would take a minute.
        script = Path(__file__).with_name("callers.py")
        starters = [
            subprocess.Popen(
                [sys.executable, script, server.url, key, str(CALLERS // 2)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        answers = [line for each in starters for line in each.communicate(timeout=100)[0].split()]

        assert client.llen(f"runs:{key}") == 1
        assert len(answers) == CALLERS
        assert len(set(answers)) == 1


class TestHeartbeat:
    def test_a_long_run_keeps_its_lease(self, idem: Idempotency, key: str) -> None:
        @idem.idempotent(key="{order}", name="shop.long")
        def charge(order: str) -> int:
            time.sleep(1.8 * LEASE)
            return idem.current.attempt

        second = threading.Timer(1.4 * LEASE, lambda: answers.append(charge(key)))
        answers: list[int] = []
        second.start()

        assert charge(key) == 1
        second.join()
        assert answers == [1]

    def test_a_long_await_keeps_its_lease_and_blocks_nobody(
        self, idem: Idempotency, run: Run, key: str
    ) -> None:
        @idem.idempotent(key="{order}", name="shop.long")
        async def charge(order: str) -> int:
            await asyncio.sleep(1.8 * LEASE)
            idem.current.check()
            return idem.current.attempt

        async def later() -> int:
            await asyncio.sleep(1.4 * LEASE)
            return await charge(key)

        async def both() -> Any:
            threads = threading.active_count()
            answers = await asyncio.gather(charge(key), later())
            assert not asyncio_heartbeat().held()
            assert threading.active_count() == threads
            return answers

        assert run(both()) == [1, 1]

    def test_one_round_trip_extends_all_of_a_loop(
        self, idem: Idempotency, run: Run, client: redis.Redis, key: str
    ) -> None:
        async def many() -> list[int]:
            store = idem.async_executor.store
            extend, sizes = store.extend, []

            async def counting(leases: Any, timeout: float) -> Any:
                sizes.append(len(leases))
                return await extend(leases, timeout)

            store.extend = counting  # type: ignore[method-assign]
            sent_at = time.monotonic()
            leases: list[Lease[AsyncRecordStore]] = [
                Lease(store, Extension(idem.key_of(f"{key}:{n}"), n, 300, 1000), sent_at, lost.set)
                for n in range(1, 21)
            ]
            for lease in leases:
                asyncio_heartbeat().start_renewal(lease)
            await asyncio.wait_for(lost.wait(), 10)  # nobody has begun under these tokens
            return sizes

        lost = asyncio.Event()
        # The first beat tells; another may be due before the test has heard of it.
        assert set(run(many())) == {20}

    def test_a_lost_lease_stops_the_work_that_wants_it_so(
        self, idem: Idempotency, run: Run, client: redis.Redis, key: str
    ) -> None:
        @idem.idempotent(key="{order}", name="shop.abort", lease=0.5, on_lease_lost="abort")
        async def charge(order: str) -> None:
            client.delete(idem.executor.store.name(charge.idempotency_key_of(order)))
            await asyncio.sleep(20)

        async def lose() -> None:
            with pytest.raises(LeaseLostError):
                await charge(key)
            task = asyncio.current_task()
            assert task is not None
            assert not getattr(task, "cancelling", lambda: 0)()

        began = time.monotonic()
        run(lose())
        assert time.monotonic() - began < 10


class TestCancelling:
    def test_gives_the_key_back(self, idem: Idempotency, run: Run, key: str) -> None:
        started = asyncio.Event()

        @idem.idempotent(key="{order}", name="shop.slow")
        async def charge(order: str) -> None:
            started.set()
            await asyncio.sleep(20)

        async def cancel() -> None:
            task = asyncio.create_task(charge(key))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        run(cancel())
        assert idem.executor.store.get(charge.idempotency_key_of(key)) is None

    @pytest.mark.parametrize("moment", ["begin", "complete"])
    def test_while_the_store_answers_leaves_nothing_half_done(
        self, idem: Idempotency, run: Run, key: str, moment: str
    ) -> None:
        runs = []

        @idem.idempotent(key="{order}", name="shop.slow")
        async def charge(order: str) -> str:
            runs.append(order)
            return "charged"

        async def cancel() -> None:
            await charge("warm " + key)
            runs.clear()
            store = idem.async_executor.store
            call, tries = store._transport.call, []

            async def answer_late(command: Any, **more: Any) -> Any:
                answer = await call(command, **more)
                if command.script.name == moment:
                    tries.append(command)
                    task.cancel()
                    await asyncio.sleep(0)
                return answer

            store._transport.call = answer_late  # type: ignore[method-assign]
            task = asyncio.create_task(charge(key))
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(tries) == 1  # it was not cut off, and its answer was waited for

        run(cancel())
        record = idem.executor.store.get(charge.idempotency_key_of(key))
        if moment == "begin":
            assert (runs, record) == ([], None)
        else:
            assert record is not None
            assert (runs, record.result) == ([key], "charged")

    def test_a_waiting_duplicate_ends_it_at_once(
        self, idem: Idempotency, run: Run, key: str
    ) -> None:
        started, enough = asyncio.Event(), asyncio.Event()

        @idem.idempotent(key="{order}", name="shop.slow")
        async def charge(order: str) -> str:
            started.set()
            await enough.wait()
            return "charged"

        async def cancel() -> str:
            first = asyncio.create_task(charge(key))
            await started.wait()
            second = asyncio.create_task(charge(key))
            # Most likely it waits by then; wherever it is, it ends.
            await asyncio.sleep(0.1)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            assert not first.done()
            enough.set()
            return await first

        assert run(cancel()) == "charged"


class TestSteps:
    def test_are_kept_for_the_next_run(self, shop: Shop, key: str) -> None:
        done = []

        def step(name: str) -> str:
            done.append(name)
            return name

        if shop.kind == "plain":

            @shop.idem.idempotent(key="{order}", name="shop.steps")
            def charge(order: str) -> Any:
                value = shop.idem.current.step("reserve", step, "r-1")
                if len(done) == 1:
                    done.append("raised")
                    raise Declined
                return value

            call: Callable[[], Any] = lambda: charge(key)  # noqa: E731
        else:

            async def awaited(name: str) -> str:
                return step(name)

            @shop.idem.idempotent(key="{order}", name="shop.steps")
            async def acharge(order: str) -> Any:
                value = await shop.idem.current.step("reserve", awaited, "r-1")
                if len(done) == 1:
                    done.append("raised")
                    raise Declined
                return value

            call = lambda: shop._run(acharge(key))  # noqa: E731

        with pytest.raises(Declined):
            call()
        assert call() == "r-1"
        assert done == ["r-1", "raised"]


class TestStoreAway:
    URL = "redis://127.0.0.1:1"

    @pytest.mark.parametrize("kind", ["plain", "async"])
    def test_raise_is_the_default_and_run_runs(self, kind: str) -> None:
        idem = Idempotency(self.URL, redis_timeout=0.2)
        for policy, wanted in ((None, StoreUnavailableError), ("run", None)):
            options = {"on_store_error": policy} if policy else {}
            if kind == "plain":
                call = idem.idempotent(**options)(lambda order: idem.current.protected)
            else:

                async def charge(order: str) -> bool:
                    return idem.current.protected

                app_tasks = idem.idempotent(**options)(charge)
                call = lambda order, app_tasks=app_tasks: asyncio.run(app_tasks(order))  # noqa: E731
            if wanted:
                with pytest.raises(wanted):
                    call("1")
            else:
                assert call("1") is False


class TestWhatItIsMadeFrom:
    def test_an_app_gives_its_settings_and_its_connections(
        self, server: RedisServer, key: str
    ) -> None:
        app = Celery("shop", backend=server.url, set_as_current=False)
        app.conf.update(idempotency_lease=7, idempotency_on_conflict="reject")
        idem = Idempotency(app, key_prefix=key)

        assert idem.settings.lease == 7
        assert idem.settings.on_conflict == "wait"
        assert idem.idempotent(lambda order: order)(key) == key
        assert Idempotency(app, key_prefix=key).executor is idem.executor

    def test_a_client_serves_its_own_world(self, server: RedisServer, key: str) -> None:
        blocking = Idempotency(server.client(), key_prefix=key)

        async def charge(order: str) -> str:
            return order

        assert blocking.idempotent(lambda order: order)(key) == key
        with pytest.raises(SettingsError, match=r"gave a Redis that is neither a redis\.asyncio"):
            asyncio.run(blocking.idempotent(charge)(key))

        async def own() -> None:
            client = redis.asyncio.Redis.from_url(server.url)
            awaited = Idempotency(client, key_prefix=key)
            assert await awaited.idempotent(charge)(key) == key
            with pytest.raises(SettingsError, match=r"that is neither a redis\.Redis nor"):
                awaited.idempotent(lambda order: order)(key)
            await client.aclose()

        asyncio.run(own())

    def test_the_function_keeps_its_name_and_signature(self, idem: Idempotency) -> None:
        @idem.idempotent
        def charge(order: str) -> str:
            """Charges."""
            return order

        assert (charge.__name__, charge.__doc__) == ("charge", "Charges.")
        assert list(inspect.signature(charge).parameters) == ["order"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"leese": 1}, "there is no option idempotency_leese; did you mean idempotency_lease?"),
        ({"lease": 0}, "idempotency_lease must be a number of seconds"),
        (
            {"on_conflict": "retry"},
            "idempotency_on_conflict must be 'wait' or 'raise' outside tasks",
        ),
        (
            {"on_conflict": "ignore"},
            "idempotency_on_conflict must be 'wait' or 'raise' outside tasks",
        ),
        (
            {"on_store_error": "retry"},
            "idempotency_on_store_error must be 'raise' or 'run' outside tasks",
        ),
        ({"dedupe_publish": True}, "idempotency_dedupe_publish is for tasks only"),
        ({"serializer": "nonesuch"}, "kombu has no serializer 'nonesuch'"),
        ({"offload_backend": "file:///tmp"}, "create Idempotency from the app"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Idempotency("redis://", **options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"key_prefix": "x"}, "idempotency_key_prefix can only be set for the whole engine"),
        ({"serializer": "pickle"}, "does not let anyone read"),
        ({"key": "order:{number}"}, "idempotency_key names 'number'"),
    ],
)
def test_so_is_one_of_a_function(idem: Idempotency, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        idem.idempotent(name="shop.charge", **options)(lambda order: order)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("shop.charge")


def test_a_killed_process_leaves_a_key_that_is_taken_over(
    server: RedisServer, client: redis.Redis, key: str
) -> None:
    script = Path(__file__).with_name("callers.py")
    victim = subprocess.Popen([sys.executable, script, server.url, key, "1", "forever"])
    eventually(lambda: client.llen(f"runs:{key}") == 1, seconds=30)
    victim.kill()
    victim.wait()

    # The script's engine has the prefix that its key is.
    own = Idempotency(server.url, key_prefix=key, lease=1, wait_timeout=20)
    again = own.idempotent(key="{order}", name="engine.callers")(lambda order: own.current.attempt)
    assert again(key) == 2
    assert not heartbeat.held()
