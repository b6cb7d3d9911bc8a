"""The behaviours that celery-singleton's tests check, after a migration.

Each test is named for the behaviour. A test whose docstring begins with "Differs" asserts what
celery-idempotent does instead, on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from kombu.exceptions import OperationalError
from redis import Redis

from celery_idempotent import State
from celery_idempotent.task.result import RecordResult
from tests.migration.conftest import NO_WORKER, make_app, make_task
from tests.migration.migrated_tasks import (
    ONE_AT_A_TIME,
    short_wait_in_queue,
    single,
    single_failing,
)
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger

pytestmark = [pytest.mark.exhaustive, pytest.mark.worker, pytest.mark.xdist_group("migration")]


class TestSimpleTask:
    def test_duplicates_have_one_id(
        self, shop: Shop, order: str, waiting_messages: Callable[[], int]
    ) -> None:
        results = [single.apply_async((order,), queue=NO_WORKER) for _ in range(10)]

        assert len(set(results)) == 1
        assert waiting_messages() == 1

    def test_different_calls_have_different_ids(
        self, shop: Shop, order: str, waiting_messages: Callable[[], int]
    ) -> None:
        results = [single.apply_async((order, n), queue=NO_WORKER) for n in range(5)]

        assert len(set(results)) == 5
        assert waiting_messages() == 5

    def test_the_same_call_by_keyword_is_a_duplicate(self, shop: Shop, order: str) -> None:
        """Differs: celery-singleton has another lock for it."""
        first = single.apply_async((order,), queue=NO_WORKER)
        assert single.apply_async(kwargs={"order": order}, queue=NO_WORKER).id == first.id

    def test_after_success_a_call_has_another_id(self, ledger: Ledger, order: str) -> None:
        first = single.delay(order)
        first.get(SOON)

        second = single.delay(order)

        assert second.get(SOON) != first.get(SOON)
        assert len(ledger.runs(order)) == 2

    def test_after_an_error_a_call_has_another_id(self, ledger: Ledger, order: str) -> None:
        first = single_failing.delay(order)
        with pytest.raises(Exception, match=order):
            first.get(SOON)

        assert single_failing.delay(order).id != first.id
        ledger.wait_for_run(order, 2)

    def test_the_id_of_the_queued_call_can_be_read(self, shop: Shop, order: str) -> None:
        first = single.apply_async((order,), queue=NO_WORKER)

        record = single.idempotency_record(order)

        assert record is not None
        assert (record.state, record.task_id) == (State.RESERVED, first.id)

    def test_a_publish_that_fails_raises_and_leaves_no_lock(
        self, shop: Shop, order: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(shop.app.amqp, "send_task_message", _fail)
            with pytest.raises(OperationalError, match="no broker"):
                single.apply_async((order,), queue=NO_WORKER)

        assert single.idempotency_record(order) is None
        assert single.delay(order).get(SOON)["amount"] == 1


def _fail(*_: Any, **__: Any) -> None:
    raise OperationalError("no broker")


class TestRaiseOnDuplicate:
    def test_the_id_of_the_duplicate_is_that_of_the_first_call(
        self, shop: Shop, order: str
    ) -> None:
        """Differs: nothing is raised; the type shows that the result belongs to another call."""
        first = single.apply_async((order,), queue=NO_WORKER)
        duplicate = single.apply_async((order,), queue=NO_WORKER)

        assert duplicate.id == first.id
        assert not isinstance(first, RecordResult)
        assert isinstance(duplicate, RecordResult)

    def test_a_call_with_a_task_id_of_its_own_is_published(self, shop: Shop, order: str) -> None:
        """Differs: others may wait for that id."""
        single.apply_async((order,), queue=NO_WORKER)
        task_id = str(uuid4())

        assert single.apply_async((order,), task_id=task_id, queue=NO_WORKER).id == task_id


class TestClearLocks:
    def test_forgotten_calls_can_be_queued_again(
        self, shop: Shop, order: str, waiting_messages: Callable[[], int]
    ) -> None:
        for n in range(5):
            single.apply_async((order, n), queue=NO_WORKER)

        assert all(single.idempotency_forget(order, n) for n in range(5))

        for n in range(5):
            single.apply_async((order, n), queue=NO_WORKER)
        assert waiting_messages() == 10


class TestUniqueOn:
    @pytest.fixture
    def key_of(self) -> Callable[..., str]:
        """``key_of(rule)(arguments)``: the key of a call of a task with this rule."""

        def key_of(rule: Any) -> Any:
            def body(a: int, b: int = 2, c: int = 3, d: int = 4) -> None: ...

            task = make_task(make_app(), body, idempotency_key=rule, **ONE_AT_A_TIME)
            return lambda *args, **kwargs: str(task.idempotency_key_of(*args, **kwargs))

        return key_of

    def test_arguments_by_position(self, key_of: Any) -> None:
        key = key_of(("a", "c"))
        assert key(2, 3, 4, 5) == key(2, 9, 4, 9) != key(2, 3, 5, 5)

    def test_arguments_by_keyword(self, key_of: Any) -> None:
        key = key_of(("b", "d"))
        assert key(2, b=3, c=4, d=5) == key(9, b=3, d=5) != key(2, b=3, c=4, d=6)

    def test_no_arguments(self, key_of: Any) -> None:
        key = key_of(lambda *_, **__: "all")
        assert key(2, b=3, c=4, d=5) == key(9)

    def test_a_single_argument(self, key_of: Any) -> None:
        key = key_of(("c",))
        assert key(2, b=3, c=4, d=5) == key(9, c=4) != key(2, b=3, c=5, d=5)

    def test_an_omitted_default(self, key_of: Any) -> None:
        key = key_of(("d",))
        assert key(2, b=3, c=4) == key(2, d=4) != key(2, d=5)


class TestLockExpiry:
    def test_the_lock_of_a_waiting_call_expires(self, shop: Shop, order: str) -> None:
        first = short_wait_in_queue.apply_async((order,), queue=NO_WORKER)
        eventually(lambda: short_wait_in_queue.idempotency_record(order) is None)

        assert short_wait_in_queue.apply_async((order,), queue=NO_WORKER).id != first.id


class TestUuids:
    """celery-singleton needs an encoder of the user's for arguments that are not JSON."""

    def test_duplicates_have_one_id(self, shop: Shop) -> None:
        order = uuid4()
        results = [single.apply_async((order,), queue=NO_WORKER) for _ in range(10)]
        assert len(set(results)) == 1

    def test_different_calls_have_different_ids(self, shop: Shop) -> None:
        results = [single.apply_async((uuid4(),), queue=NO_WORKER) for _ in range(5)]
        assert len(set(results)) == 5

    def test_a_uuid_and_its_text_are_two_calls(self, shop: Shop, order: str) -> None:
        """Differs: with an encoder that writes text they share a lock."""
        first = single.apply_async((str(UUID(order)),), queue=NO_WORKER)
        assert single.apply_async((UUID(order),), queue=NO_WORKER).id != first.id


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "url"),
        [
            ({"result_backend": "redis://backend", "broker_url": "redis://broker"}, "backend"),
            ({"result_backend": "rpc://", "broker_url": "redis://broker"}, "broker"),
            ({"result_backend": "redis://backend", "idempotency_redis_url": "redis://own"}, "own"),
        ],
        ids=["result backend", "else broker", "setting"],
    )
    def test_the_server(self, settings: dict[str, Any], url: str) -> None:
        config = make_task(make_app(**settings)).idempotency_configuration
        assert config.executor.store.config.url == f"redis://{url}"

    @pytest.mark.parametrize("prefix", ["idem", "lock_prefix:"])
    def test_the_key_prefix(self, prefix: str) -> None:
        settings = {} if prefix == "idem" else {"idempotency_key_prefix": prefix}
        config = make_task(make_app(**settings)).idempotency_configuration
        assert config.executor.store.config.prefix == prefix

    def test_a_setting_is_the_default_of_all_tasks(self) -> None:
        settings = make_task(make_app(**ONE_AT_A_TIME)).idempotency_configuration.settings
        assert (settings.until, settings.dedupe_publish) == ("finished", True)

    def test_an_option_of_a_task_overrides_the_setting(self) -> None:
        task = make_task(make_app(**ONE_AT_A_TIME), idempotency_until="expired")
        assert task.idempotency_configuration.settings.until == "expired"

    def test_a_client_of_the_user_replaces_the_backend_class(self) -> None:
        client = Redis.from_url("redis://own")
        task = make_task(make_app(idempotency_redis_client=client))
        assert task.idempotency_configuration.executor.store.client is client
