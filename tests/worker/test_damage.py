"""Damaged records and calls without a key fail with one clear error; other tasks run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from kombu.exceptions import EncodeError
from redis import Redis

from celery_idempotent import CorruptRecordError, KeyRuleError, LeaseLostError, State
from tests.unit.record.raw import raw_record
from tests.waiting import SOON, eventually
from tests.worker.canvas_tasks import ship
from tests.worker.harness import Shop, Worker
from tests.worker.ledger import Ledger
from tests.worker.tasks import charge, misruled, misruled_early, pack, reserved, short_lease

pytestmark = pytest.mark.worker

Damage = Callable[[Redis, str], object]

MINUTE_MS = 60_000


def put(raw: bytes) -> Damage:
    return lambda redis, name: redis.set(name, raw, px=MINUTE_MS)


def another_type(redis: Redis, name: str) -> None:
    redis.delete(name)
    redis.rpush(name, "no record")
    redis.pexpire(name, MINUTE_MS)


WHOLE = raw_record(b"C", fingerprint=b"", execution_id=b"", form=b"json", body=b'{"receipt": "1"}')
HEAD = len(WHOLE) - len(b'{"receipt": "1"}')

#: Values that are not a record.
UNREADABLE: dict[str, Damage] = {
    "empty": put(b""),
    "a letter": put(WHOLE[:1]),
    "half a head": put(WHOLE[: HEAD // 2]),
    "a head but for a byte": put(WHOLE[: HEAD - 1]),
    "of a newer version": put(b"Q" + WHOLE[1:]),
    "of another library": put(b'{"status": "SUCCESS"}'),
    "a list": another_type,
    "64 MB": put(b"\xff" * 64_000_000),
}

#: COMPLETED records with a damaged result.
UNREADABLE_RESULT: dict[str, Damage] = {
    "cut short": put(WHOLE[:-1]),
    "of a type that is not accepted": put(
        raw_record(b"C", fingerprint=b"", execution_id=b"", form=b"pickle", body=b"\x80\x04N.")
    ),
    "of no type": put(raw_record(b"C", fingerprint=b"", execution_id=b"", form=b"\x01", body=b"")),
    "deep": put(
        raw_record(b"C", fingerprint=b"", execution_id=b"", form=b"json", body=b"[" * 100_000)
    ),
    "compressed, but not": put(
        raw_record(b"C", fingerprint=b"", execution_id=b"", form=b"json+gzip", body=b"no")
    ),
}

damages = pytest.mark.parametrize("damage", [*UNREADABLE, *UNREADABLE_RESULT])
heads = pytest.mark.parametrize("damage", UNREADABLE)


def damaged(shop: Shop, task: Any, damage: str, *args: Any) -> str:
    """Stores a damaged record for the key of a call; returns its name in Redis."""
    name = f"idem:{task.idempotency_key_of(*args)}"
    ({**UNREADABLE, **UNREADABLE_RESULT})[damage](shop.redis, name)
    return name


def log_of_task(worker: Worker, task_id: str) -> str:
    """Waits for the log line about the error of a task; returns what follows its message."""
    eventually(
        lambda: any(
            task_id in line and "raised unexpected" in line for line in worker.logs().splitlines()
        ),
        f"{worker.name()} logs the error of task {task_id}",
    )
    return worker.logs().split(task_id, 1)[1]


class TestDamagedRecord:
    @damages
    def test_task_fails_until_the_key_is_forgotten(
        self, shop: Shop, ledger: Ledger, order: str, damage: str
    ) -> None:
        name = damaged(shop, pack, damage, order)
        before = shop.redis.dump(name)

        with pytest.raises(CorruptRecordError) as caught:
            pack.delay(order).get(timeout=SOON)

        assert f"of {pack.idempotency_key_of(order)} cannot be read" in str(caught.value)
        assert len(str(caught.value)) < 250
        assert ledger.runs(order) == []
        assert shop.redis.dump(name) == before, "the damaged record is kept"
        shop.wait_until_empty()

        assert pack.idempotency_forget(order) is True
        assert pack.delay(order).get(timeout=SOON)["receipt"]
        assert len(ledger.runs(order)) == 1

    def test_a_reservation_for_no_message_fails_the_task(self, shop: Shop, order: str) -> None:
        name = f"idem:{pack.idempotency_key_of(order)}"
        deadline = shop.redis.time()[0] * 1000 + MINUTE_MS  # type: ignore[index]
        reserved = raw_record(b"R", at_ms=deadline, fingerprint=b"", execution_id=b"8 bytes.\x11")
        put(reserved)(shop.redis, name)

        with pytest.raises(CorruptRecordError, match="cannot be read"):
            pack.delay(order).get(timeout=SOON)

        assert shop.redis.get(name) == reserved

    @pytest.mark.parametrize(
        "error", ["celery.exceptions.Ignore", "celery.exceptions.WorkerShutdown"]
    )
    def test_a_forged_error_controls_no_worker(self, shop: Shop, order: str, error: str) -> None:
        module, _, name = error.rpartition(".")
        forged = json.dumps({"exc_type": name, "exc_module": module, "exc_message": []}).encode()
        record = raw_record(b"F", fingerprint=b"", execution_id=b"", form=b"json", body=forged)
        put(record)(shop.redis, f"idem:{pack.idempotency_key_of(order)}")

        with pytest.raises(CorruptRecordError, match="cannot be read"):
            pack.delay(order).get(timeout=SOON)

        shop.wait_until_empty()

    def test_is_logged_as_an_error(self, shop: Shop, order: str) -> None:
        damaged(shop, pack, "half a head", order)
        result = pack.delay(order)
        result.get(timeout=SOON, propagate=False)

        log = log_of_task(shop.workers[0], result.id)

        assert re.search(r"ERROR/.*raised unexpected: CorruptRecordError", log)
        assert "forget the key to start afresh" in log

    def test_other_tasks_run(self, shop: Shop, ledger: Ledger, order: str) -> None:
        damaged(shop, pack, "a list", order)
        results = [pack.delay(order) for _ in range(10)]
        others = [pack.delay(f"{order} {n}") for n in range(10)]

        assert all(other.get(timeout=SOON)["receipt"] for other in others)
        for result in results:
            with pytest.raises(CorruptRecordError):
                result.get(timeout=SOON)
        shop.wait_until_empty()

    @damages
    def test_publish_fails_and_sends_no_message(self, shop: Shop, order: str, damage: str) -> None:
        damaged(shop, reserved, damage, order)

        if damage in UNREADABLE:
            with pytest.raises(CorruptRecordError, match="cannot be read"):
                reserved.apply_async((order,), queue="unconsumed")
        else:
            with pytest.raises(CorruptRecordError, match="cannot be read"):
                reserved.apply_async((order,), queue="unconsumed").get(timeout=SOON)
        assert shop.redis.llen("unconsumed") == 0

    @heads
    def test_idempotency_record_fails(self, shop: Shop, order: str, damage: str) -> None:
        damaged(shop, pack, damage, order)

        with pytest.raises(CorruptRecordError, match="forget the key to start afresh"):
            pack.idempotency_record(order)

    def test_record_with_a_damaged_result_can_be_read(self, shop: Shop, order: str) -> None:
        damaged(shop, pack, "cut short", order)

        record = pack.idempotency_record(order)

        assert record.state is State.COMPLETED
        with pytest.raises(CorruptRecordError, match="the result of .* cannot be read as json"):
            _ = record.result


class TestRecordDamagedDuringTheExecution:
    @heads
    def test_caller_still_gets_the_result(
        self, shop: Shop, ledger: Ledger, order: str, damage: str
    ) -> None:
        ledger.hold(order)
        result = charge.delay(order)
        ledger.wait_for_run(order)
        name = damaged(shop, charge, damage, order)
        ledger.release(order)

        assert result.get(timeout=SOON)["receipt"]
        assert shop.redis.exists(name), "the damaged record is kept"
        with pytest.raises(CorruptRecordError):
            charge.delay(order).get(timeout=SOON)
        assert len(ledger.runs(order)) == 1

    @pytest.mark.parametrize("damage", ["half a head", "a list"])
    def test_heartbeat_logs_it_and_the_task_continues(
        self, shop: Shop, ledger: Ledger, order: str, damage: str
    ) -> None:
        ledger.hold(order)
        result = short_lease.delay(order)
        ledger.wait_for_run(order)
        damaged(shop, short_lease, damage, order)
        key = str(short_lease.idempotency_key_of(order))
        shop.workers[0].wait_for_log(
            f"{key}: task {result.id} (attempt 1) has lost its lease"
            if damage == "half a head"
            else f"The lease of {key} could not be extended: the record of {key} cannot be read"
        )
        ledger.release(order)

        assert result.get(timeout=SOON)["receipt"]

    def test_execution_ends_at_a_step_that_cannot_be_stored(
        self, shop: Shop, ledger: Ledger, order: str
    ) -> None:
        ledger.hold(f"charge of {order}")
        result = ship.delay(order)
        eventually(lambda: ledger.notes(order), "the first step has begun")
        damaged(shop, ship, "half a head", order)
        ledger.release(f"charge of {order}")

        with pytest.raises(LeaseLostError):
            result.get(timeout=SOON)
        assert ledger.notes(order) == ["charge"]

    def test_damaged_steps_do_not_run_again(self, shop: Shop, ledger: Ledger, order: str) -> None:
        ship.delay(order, "book", "error").get(timeout=SOON, propagate=False)
        name = f"idem:{ship.idempotency_key_of(order, 'book', 'error')}"
        shop.redis.set(name, shop.redis.get(name)[:-3], keepttl=True)

        with pytest.raises(CorruptRecordError, match=r"the steps of .* cannot be read"):
            ship.delay(order, "book", "error").get(timeout=SOON)
        assert ledger.notes(order) == ["charge", "book"]

        assert ship.idempotency_forget(order, "book", "error")
        assert ship.delay(order, "book").get(timeout=SOON)


class TestRuleWithoutAKey:
    @pytest.mark.parametrize(
        ("fault", "sentence"),
        [
            ("raises", "idempotency_key raised LookupError; it must return a key for every call"),
            ("none", "what idempotency_key returned is None, which is not a key; it must be text"),
            (
                "empty",
                "what idempotency_key returned is empty, which is not a key; it must be text",
            ),
            ("nan", "what idempotency_key returned is NaN"),
            ("object", "what idempotency_key returned has no canonical form (type object)"),
        ],
    )
    def test_fails_in_worker_and_publisher(
        self, shop: Shop, ledger: Ledger, order: str, fault: str, sentence: str
    ) -> None:
        with pytest.raises(KeyRuleError) as in_worker:
            misruled.delay(fault, order).get(timeout=SOON)
        with pytest.raises(KeyRuleError) as at_publish:
            misruled_early.delay(fault, order)

        assert str(in_worker.value).startswith(f"shop.misruled: {sentence}")
        assert str(at_publish.value).startswith(f"shop.misruled_early: {sentence}")
        assert order not in str(in_worker.value)
        assert ledger.runs(order) == []

    def test_is_logged_as_an_error(self, shop: Shop, order: str) -> None:
        result = misruled.delay("raises", order)
        result.get(timeout=SOON, propagate=False)

        log = log_of_task(shop.workers[0], result.id)

        assert "raised unexpected: KeyRuleError" in log
        shop.workers[0].wait_for_log("LookupError: no such order", "it logs the cause")

    @pytest.mark.parametrize("fault", ["long", "control"])
    @pytest.mark.parametrize("task", [misruled, misruled_early], ids=["worker", "publisher"])
    def test_keys_may_have_any_length_and_characters(
        self, shop: Shop, ledger: Ledger, order: str, task: Any, fault: str
    ) -> None:
        first = task.delay(fault, order).get(timeout=SOON)

        assert task.delay(fault, order).get(timeout=SOON) == first
        assert len(ledger.runs(order)) == 1
        record = task.idempotency_record(fault, order)
        assert record.key.isprintable()
        assert len(record.key) < 60


class TestArguments:
    @pytest.mark.parametrize(
        "value",
        [
            "x" * 1_000_000,
            "half a \ud800 letter",
            "two \ud83d\ude00 halves",
            10**4000,
            float("inf"),
            (1, (2,)),
            {1: {None: "a"}},
            datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Zurich")),
            datetime(2026, 1, 1, tzinfo=timezone.utc),
            list(range(20_000)),
        ],
        ids=[
            "megabyte",
            "half-a-letter",
            "two-halves",
            "huge",
            "infinite",
            "tuples",
            "keys",
            "summer-time",
            "utc",
            "list",
        ],
    )
    def test_have_the_same_key_in_publisher_and_worker(
        self, shop: Shop, ledger: Ledger, order: str, value: Any
    ) -> None:
        result = pack.delay(order, amount=value)
        eventually(lambda: ledger.runs(order) and ledger.runs(order)[-1].end, "it has run")

        assert ledger.runs(order)[-1].key == str(pack.idempotency_key_of(order, amount=value))
        result.forget()

    @pytest.mark.parametrize("value", [float("nan"), [[float("nan")]]], ids=["nan", "nan-inside"])
    def test_without_a_canonical_form_are_rejected(
        self, shop: Shop, ledger: Ledger, order: str, value: Any
    ) -> None:
        with pytest.raises(KeyRuleError) as caught:
            pack.delay(order, amount=value).get(timeout=SOON)

        assert str(caught.value) == (
            "shop.pack: argument 'amount' is NaN, which equals nothing, not even itself; give the "
            "task an idempotency_key that leaves it out"
        )
        assert ledger.runs(order) == []
        assert charge.delay(order, amount=value).get(timeout=SOON), "whose key leaves it out"

    def test_nested_too_deeply_are_rejected(self, shop: Shop, ledger: Ledger, order: str) -> None:
        value: Any = 1
        for _ in range(200):
            value = [value]

        with pytest.raises(KeyRuleError, match="argument 'amount' is nested more than 100 levels"):
            pack.delay(order, amount=value).get(timeout=SOON)
        assert ledger.runs(order) == []

    def test_that_cannot_be_serialized_are_rejected_by_celery(self, shop: Shop, order: str) -> None:
        endless: list[Any] = []
        endless.append(endless)
        deep: Any = 1
        for _ in range(10_000):
            deep = [deep]

        for value in (endless, deep, 10**5000, object()):
            with pytest.raises((EncodeError, RecursionError, ValueError)):
                pack.delay(order, amount=value)
        for value in (endless, deep, object()):
            with pytest.raises(KeyRuleError, match="argument 'amount' "):
                reserved.delay(order, amount=value)
        assert shop.redis.llen("celery") == 0
