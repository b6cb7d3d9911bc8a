"""The behaviours that celery-once's tests check, after a migration.

Each test is named for the behaviour. A test whose docstring begins with "Differs" asserts what
celery-idempotent does instead, on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent import ConflictError, IdempotentTask, KeyReusedError
from celery_idempotent.errors import SettingsError
from celery_idempotent.testing import IsolatedRecords
from tests.docs.pages import ROOT
from tests.migration.conftest import NO_WORKER, make_app, make_task
from tests.migration.migrated_tasks import (
    COLLAPSED,
    ONE_AT_A_TIME,
    collapsed,
    collapsed_by_order,
    short_wait_in_queue,
    single,
    single_by_order,
    single_failing,
    single_retrying,
)
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger

pytestmark = [pytest.mark.exhaustive, pytest.mark.worker, pytest.mark.xdist_group("migration")]

GUIDE = ROOT / "docs/migrating-from-celery-once.md"


def running(ledger: Ledger, order: str) -> int:
    """Returns the number of executions of `order` that have not ended."""
    return sum(run.end is None for run in ledger.runs(order))


class TestLock:
    def test_a_queued_call_is_not_queued_again(
        self, shop: Shop, order: str, waiting_messages: Callable[[], int]
    ) -> None:
        """Differs: the duplicate gets the result of the queued call instead of AlreadyQueued."""
        first = single.apply_async((order,), queue=NO_WORKER)

        assert single.apply_async((order,), queue=NO_WORKER).id == first.id
        assert single.apply_async(kwargs={"order": order}, queue=NO_WORKER).id == first.id
        assert waiting_messages() == 1

    def test_a_running_call_is_not_queued_again(self, ledger: Ledger, order: str) -> None:
        ledger.hold(order)
        first = single.delay(order)
        ledger.wait_for_run(order)

        duplicate = single.delay(order)
        ledger.release(order)

        assert duplicate.id == first.id
        assert duplicate.get(SOON) == first.get(SOON)
        assert len(ledger.runs(order)) == 1

    def test_the_lock_is_released_after_success(self, ledger: Ledger, order: str) -> None:
        receipts = [single.delay(order).get(SOON)["receipt"] for _ in range(2)]

        assert len(set(receipts)) == len(ledger.runs(order)) == 2

    def test_the_lock_is_released_after_an_error(self, ledger: Ledger, order: str) -> None:
        for _ in range(2):
            with pytest.raises(Exception, match=order):
                single_failing.delay(order).get(SOON)

        assert len(ledger.runs(order)) == 2

    def test_the_lock_of_a_waiting_call_expires(
        self, order: str, waiting_messages: Callable[[], int]
    ) -> None:
        first = short_wait_in_queue.apply_async((order,), queue=NO_WORKER)
        eventually(lambda: short_wait_in_queue.idempotency_record(order) is None)

        assert short_wait_in_queue.apply_async((order,), queue=NO_WORKER).id != first.id
        assert waiting_messages() == 2

    def test_a_running_call_has_no_timeout(self, ledger: Ledger, order: str) -> None:
        """Differs: celery-once runs a second one after the timeout, here twice the lease."""
        ledger.hold(order)
        first = single_by_order.delay(order)
        lease_ends = single_by_order.idempotency_configuration.settings.lease
        started_at = ledger.wait_for_run(order).started_at
        eventually(lambda: _now(ledger) > started_at + 2 * lease_ends)

        assert single_by_order.delay(order).id == first.id
        ledger.release(order)
        first.get(SOON)
        assert len(ledger.runs(order)) == 1

    def test_clear_lock(self, order: str, waiting_messages: Callable[[], int]) -> None:
        first = single.apply_async((order,), queue=NO_WORKER)

        assert single.idempotency_forget(order) is True

        assert single.apply_async((order,), queue=NO_WORKER).id != first.id
        assert waiting_messages() == 2


def _now(ledger: Ledger) -> float:
    seconds, microseconds = ledger._redis.time()
    return seconds + microseconds / 1_000_000


class TestGraceful:
    def test_a_duplicate_gets_no_exception(self, ledger: Ledger, order: str) -> None:
        """Differs: its result is that of the first call instead of None."""
        ledger.hold(order)
        first = single.delay(order)
        duplicate = single.delay(order)
        ledger.release(order)

        assert duplicate.get(SOON) == first.get(SOON) != None  # noqa: E711

    def test_an_exception_can_be_raised(
        self, shop: Shop, order: str, waiting_messages: Callable[[], int]
    ) -> None:
        task = make_task(
            shop.app,
            lambda order: None,
            name=f"shop.{order}",
            idempotency_until="finished",
            idempotency_dedupe_publish="raise",
        )
        call = task.s(order).set(queue=NO_WORKER)
        first = call.delay()

        with pytest.raises(ConflictError, match=first.id) as caught:
            call.delay()
        assert caught.value.task_id == first.id
        assert waiting_messages() == 1


class TestUnlockBeforeRun:
    def test_a_running_call_can_be_queued_again_once(self, ledger: Ledger, order: str) -> None:
        ledger.hold(order)
        first = collapsed.delay(order)
        ledger.wait_for_run(order)

        later = {collapsed.delay(order).id for _ in range(5)}

        assert len(later) == 1
        assert later != {first.id}
        ledger.release(order)
        eventually(lambda: [run.end for run in ledger.runs(order)] == ["returned"] * 2)

    def test_the_next_call_waits_for_the_end_of_the_running_one(
        self, shop: Shop, ledger: Ledger, order: str
    ) -> None:
        """Differs: with celery-once both run at the same time."""
        ledger.hold(order)
        collapsed.delay(order)
        ledger.wait_for_run(order)

        second = collapsed.delay(order)
        ledger.wait_for_signal(second.id, "conflicted")

        assert running(ledger, order) == 1
        ledger.release(order)
        second.get(SOON)
        assert [run.end for run in ledger.runs(order)] == ["returned"] * 2


class TestRetry:
    def test_a_retry_does_not_meet_its_own_lock(self, ledger: Ledger, order: str) -> None:
        assert single_retrying.delay(order, 0).get(SOON) == "retried"
        assert len(ledger.runs(order)) == 2

    def test_the_lock_is_kept_between_the_attempts(self, ledger: Ledger, order: str) -> None:
        """Differs: celery-once releases the lock before the retry."""
        first = single_retrying.delay(order, 600)
        ledger.wait_for_signal(first.id, "released")

        assert single_retrying.delay(order, 600).id == first.id
        first.revoke()


class TestKeys:
    @pytest.fixture
    def key_of(self) -> Callable[..., Callable[..., str]]:
        """``key_of(body, option=…)(arguments)``: the key of a call of such a task."""

        def key_of(body: Callable[..., Any], **options: Any) -> Callable[..., str]:
            task = make_task(make_app(), body, **options, **ONE_AT_A_TIME)
            return lambda *args, **kwargs: str(task.idempotency_key_of(*args, **kwargs))

        return key_of

    def test_of_a_task_without_arguments(self, key_of: Any) -> None:
        key = key_of(lambda: None)
        assert key() == key()

    def test_of_arguments_by_position_and_by_keyword(self, key_of: Any) -> None:
        key = key_of(lambda a, b: None)
        assert key(1, 2) == key(1, b=2) == key(b=2, a=1) != key(2, 1)

    def test_of_a_bound_task(self, key_of: Any) -> None:
        key = key_of(lambda self, a, b: None, bind=True)
        assert key(1, 2) == key(a=1, b=2)

    def test_of_a_task_with_autoretry_for(self, key_of: Any) -> None:
        def task(a: int, b: int) -> None: ...

        plain = key_of(task)(1, 2)
        assert key_of(task, autoretry_for=(Exception,))(a=1, b=2) == plain

    def test_of_some_arguments(self, key_of: Any) -> None:
        key = key_of(lambda a, b: None, idempotency_key=("a",))
        assert key(1, 2) == key(a=1, b=3) != key(2, 2)

    def test_of_the_name_of_the_task_alone(self, key_of: Any) -> None:
        key = key_of(lambda a, b: None, idempotency_key=lambda *_, **__: "all")
        assert key(1, 2) == key(3, b=4)

    def test_of_nested_mappings_in_any_order(self, key_of: Any) -> None:
        key = key_of(lambda a: None)
        assert key({"x": {"a": 1, "b": 2}, "y": [1, "2"]}) == key(
            {"y": [1, "2"], "x": {"b": 2, "a": 1}}
        )

    def test_of_text_that_is_not_ascii(self, key_of: Any) -> None:
        key = key_of(lambda a: None)
        assert key({"é": "è"}) == key({"é": "è"}) != key({"e": "e"})

    def test_of_values_with_the_same_text(self, key_of: Any) -> None:
        """Differs: celery-once compares texts, so these share a lock."""
        key = key_of(lambda a: None)
        assert len({key(1), key("1"), key(True), key("True")}) == 4

    def test_of_an_omitted_default(self, key_of: Any) -> None:
        """Differs: for celery-once these are two calls."""
        key = key_of(lambda a=1: None)
        assert key() == key(1) == key(a=1)

    def test_calls_that_differ_in_other_arguments_run_one_after_the_other(
        self, ledger: Ledger, order: str
    ) -> None:
        """Differs: celery-once refuses the second call, and its arguments are lost."""
        ledger.hold(order)
        first = single_by_order.delay(order, amount=1)
        ledger.wait_for_run(order)

        second = single_by_order.delay(order, amount=2)
        ledger.wait_for_signal(second.id, "conflicted")

        assert running(ledger, order) == 1
        ledger.release(order)
        assert [first.get(SOON)["amount"], second.get(SOON)["amount"]] == [1, 2]

    def test_a_waiting_call_does_not_swallow_other_arguments(
        self, order: str, waiting_messages: Callable[[], int]
    ) -> None:
        """Differs: celery-once refuses the second call in the same way as an equal one."""
        collapsed_by_order.apply_async((order, 1), queue=NO_WORKER)

        with pytest.raises(KeyReusedError):
            collapsed_by_order.apply_async((order, 2), queue=NO_WORKER)
        assert waiting_messages() == 1


class TestSettings:
    def test_the_default_timeout_is_a_setting_that_a_task_overrides(self) -> None:
        def timeout(**options: Any) -> float:
            task = make_task(make_app(idempotency_reservation_ttl=60), **options, **COLLAPSED)
            return float(task.idempotency_configuration.settings.reservation_ttl)

        assert (timeout(), timeout(idempotency_reservation_ttl=120)) == (60, 120)

    @pytest.mark.parametrize(
        "url",
        [
            "redis://localhost:6379/3",
            "redis://:secret@localhost:6379",
            "rediss://localhost:6379/3",
            "redis+socket:///var/run/redis.sock?virtual_host=2",
        ],
    )
    def test_urls(self, url: str) -> None:
        task = make_task(make_app(idempotency_redis_url=url))
        assert task.idempotency_configuration.executor.store.config.url == url

    @pytest.mark.parametrize("url", ["amqp://guest@localhost//", "file:///tmp/celery_once"])
    def test_other_urls_are_refused(self, url: str) -> None:
        """Differs for files: celery-once can lock in a directory."""
        task = make_task(make_app(idempotency_redis_url=url))
        with pytest.raises(SettingsError, match="idempotency_redis_url"):
            _ = task.idempotency_configuration.executor


class TestFlask:
    def test_a_base_class_adds_a_context_to_each_run(self, idempotency: IsolatedRecords) -> None:
        events: list[str] = []

        class ContextTask(IdempotentTask):
            abstract = True

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                events.append("enter")
                try:
                    return super().__call__(*args, **kwargs)
                finally:
                    events.append("exit")

        app = make_app(task_always_eager=True)
        task = make_task(app, lambda: events.append("run"), base=ContextTask, **ONE_AT_A_TIME)

        task.delay()
        task.delay()

        assert events == ["enter", "run", "exit"] * 2
