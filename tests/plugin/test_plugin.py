"""The records of a test: isolated from all others, on a server for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import redis
from celery import Celery
from freezegun import freeze_time

from celery_idempotent import ConflictError, Idempotency, IdempotentTask, State, signals
from celery_idempotent.testing import IsolatedRecords, isolated_records
from celery_idempotent.testing.server import RedisServer

#: No server listens there: a test that passes has not used it.
ELSEWHERE = "redis://127.0.0.1:1/0"

RUNS_AGAIN = ["finished", "started"]

MakeTask = Callable[..., Any]


@pytest.fixture
def app() -> Celery:
    """An eager app that is configured for production."""
    app = Celery("plugin", broker=ELSEWHERE, backend=ELSEWHERE, set_as_current=False)
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    return app


@pytest.fixture
def runs() -> list[str]:
    """The orders of the executions, in order."""
    return []


@pytest.fixture
def make_task(app: Celery, runs: list[str]) -> MakeTask:
    def make_task(**options: Any) -> Any:
        @app.task(base=IdempotentTask, bind=True, shared=False, name="plugin.charge", **options)
        def charge(self: IdempotentTask, order: str) -> int:
            runs.append(order)
            return self.idempotency.attempt

        return charge

    return make_task


@pytest.fixture
def charge(make_task: MakeTask) -> Any:
    return make_task()


class TestFaults:
    @pytest.mark.parametrize("until", RUNS_AGAIN)
    def test_a_crash_is_taken_over_by_another_message(
        self, idempotency: IsolatedRecords, make_task: MakeTask, runs: list[str], until: str
    ) -> None:
        charge = make_task(idempotency_until=until)
        idempotency.crash(charge, "1")
        assert charge.idempotency_record("1").state is State.STARTED
        charge.delay("1")
        assert charge.idempotency_record("1").state is State.COMPLETED
        assert runs == ["1"]

    def test_expired_leases_are_taken_over(self, idempotency: IsolatedRecords, app: Celery) -> None:
        @app.task(base=IdempotentTask, bind=True, shared=False, name="plugin.slow")
        def slow(self: IdempotentTask) -> str:
            if self.idempotency.recovered:
                return "winner"
            idempotency.expire_lease(slow)
            assert slow.delay().get() == "winner"
            return "stale"

        assert slow.delay().get() == "winner"

    def test_what_cannot_fail_is_refused(self, idempotency: IsolatedRecords, charge: Any) -> None:
        with pytest.raises(AssertionError, match="is absent"):
            idempotency.expire_lease(charge, "1")
        charge.delay("1")
        with pytest.raises(AssertionError, match="begin replied 'finished'"):
            idempotency.crash(charge, "1")


def call(idempotency: IsolatedRecords, charge: Any) -> None:
    charge.delay("1")


def forget(idempotency: IsolatedRecords, charge: Any) -> None:
    charge.idempotency_forget("1")


def crash(idempotency: IsolatedRecords, charge: Any) -> None:
    idempotency.crash(charge, "1")


TWICE = "COMPLETED after 2 executions"


class TestAssertRanOnce:
    @pytest.mark.parametrize(
        ("until", "events", "error"),
        [
            ("expired", [call, call], ""),
            ("expired", [], "absent after 0 executions"),
            ("expired", [call, forget, call], TWICE),
            ("finished", [call], ""),
            *((until, [crash, call], TWICE) for until in ("expired", *RUNS_AGAIN)),
            *((until, [call, call], TWICE) for until in RUNS_AGAIN),
        ],
    )
    def test_fails_unless_the_call_ran_once(
        self, idempotency: IsolatedRecords, make_task: MakeTask, until: str, events: Any, error: str
    ) -> None:
        charge = make_task(idempotency_until=until)
        for event in events:
            event(idempotency, charge)

        with pytest.raises(AssertionError, match=error) if error else nullcontext():
            idempotency.assert_ran_once(charge, "1")

    def test_a_record_of_another_test_does_not_count(self, charge: Any) -> None:
        with isolated_records():
            charge.delay("1")
        with isolated_records() as records, pytest.raises(AssertionError, match="absent after 0"):
            records.assert_ran_once(charge, "1")

    def test_it_hides_its_frames(self, idempotency: IsolatedRecords, charge: Any) -> None:
        with pytest.raises(AssertionError) as caught:
            idempotency.assert_ran_once(charge, "1")

        shown = [entry for entry in caught.traceback if not entry.ishidden(caught)]
        assert [str(entry.path) for entry in shown] == [__file__]

    def test_counts_executions(self, idempotency: IsolatedRecords, make_task: MakeTask) -> None:
        charge = make_task(idempotency_until="finished")
        assert idempotency.executions(charge, "1") == 0
        for order in ("1", "1", "2"):
            charge.delay(order)

        assert idempotency.executions(charge, "1") == 2

    @pytest.mark.parametrize(("option", "value"), [("enabled", False), ("shadow", True)])
    def test_it_names_the_option_that_lets_duplicates_run(
        self, idempotency: IsolatedRecords, make_task: MakeTask, option: str, value: bool
    ) -> None:
        charge = make_task(**{f"idempotency_{option}": value})
        charge.delay("1")
        with pytest.raises(AssertionError, match=f"idempotency_{option} is {value}"):
            idempotency.assert_ran_once(charge, "1")


class TestIsolation:
    @pytest.mark.parametrize(
        "options",
        [
            {"idempotency_redis_url": "sentinel://127.0.0.1:1/0"},
            {"idempotency_redis_url": "redis+cluster://127.0.0.1:1"},
            {"idempotency_redis_client": lambda: redis.Redis.from_url(ELSEWHERE)},
            {"idempotency_redis_options": {"ssl": True}},
            {"idempotency_wait_replicas": 2},
            {"result_backend": "cache+memory://", "broker_url": "memory://"},
        ],
        ids=["sentinel", "cluster", "client", "tls", "replicas", "no Redis"],
    )
    def test_the_deployment_of_the_app_is_not_used(
        self, app: Celery, charge: Any, runs: list[str], options: dict[str, Any]
    ) -> None:
        app.conf.update(options)
        with isolated_records() as records:
            charge.delay("1")
            charge.delay("1")
            records.assert_ran_once(charge, "1")
        assert runs == ["1"]

    @pytest.mark.exhaustive
    def test_engines_are_isolated_as_well(
        self, app: Celery, idempotency_server: RedisServer, runs: list[str]
    ) -> None:
        engines = [Idempotency(app), Idempotency(ELSEWHERE), Idempotency(idempotency_server.url)]

        def check() -> None:
            for engine in [*engines, Idempotency(app)]:
                with isolated_records():
                    run_twice(engine)

        def run_twice(engine: Idempotency) -> None:
            @engine.idempotent(name="plugin.pack")
            def pack() -> None:
                runs.append("blocking")

            @engine.idempotent(name="plugin.apack")
            async def apack() -> None:
                runs.append("async")

            for _ in range(2):
                pack()
                asyncio.run(apack())

        check()
        check()
        assert runs == ["blocking", "async"] * 8

    def test_afterwards_a_store_continues_with_its_own_records(
        self, app: Celery, charge: Any, runs: list[str], idempotency_server: RedisServer
    ) -> None:
        app.conf.idempotency_redis_url = idempotency_server.url
        charge.delay("1")
        with isolated_records():
            charge.delay("1")
        charge.delay("1")
        assert runs == ["1", "1"]
        assert charge.idempotency_configuration.executor.store.config.prefix == "idem"

    def test_its_settings_have_the_same_records(self, make_task: MakeTask, runs: list[str]) -> None:
        with isolated_records() as records:
            make_task().delay("1")
        other = Celery("other", set_as_current=False)
        other.conf.update(task_always_eager=True, **records.settings)

        @other.task(base=IdempotentTask, shared=False, name="plugin.charge")
        def charge(order: str) -> None:
            runs.append(order)

        assert charge.delay("1").get() == 1
        assert runs == ["1"]


def test_a_disabled_app_needs_no_redis(app: Celery, charge: Any, runs: list[str]) -> None:
    app.conf.idempotency_enabled = False
    charge.delay("1")
    charge.delay("1")
    assert runs == ["1"] * 2

    with isolated_records():
        charge.delay("1")
        charge.delay("1")
    assert runs == ["1"] * 3
    charge.delay("1")
    assert runs == ["1"] * 4


@pytest.mark.exhaustive
class TestFrozenTime:
    @freeze_time("2020-02-29")
    def test_a_conflict_is_raised(
        self, idempotency: IsolatedRecords, make_task: MakeTask, runs: list[str]
    ) -> None:
        charge = make_task(idempotency_on_conflict="raise")

        def call_duplicate(**_: Any) -> None:
            with pytest.raises(ConflictError):
                charge.delay("1")
            runs.append("raised")

        signals.begun.connect(call_duplicate, weak=False)
        try:
            charge.delay("1")
        finally:
            signals.begun.disconnect(call_duplicate)
        assert runs == ["raised", "1"]

    @freeze_time("2020-02-29")
    def test_a_lease_lasts_in_another_time(self, idempotency: IsolatedRecords, app: Celery) -> None:
        @app.task(base=IdempotentTask, bind=True, shared=False, name="plugin.slow")
        def slow(self: IdempotentTask) -> int:
            with freeze_time("2030-01-01"):
                self.idempotency.check()
            return self.idempotency.attempt

        assert slow.delay().get() == 1
        idempotency.assert_ran_once(slow)
