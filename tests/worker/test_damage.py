"""Calls with a damaged record fail with one clear error, until it is forgotten.

`tests/unit/record` damages every byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from celery_idempotent import CorruptRecordError
from tests.store.record_harness import raw_record
from tests.waiting import SOON
from tests.worker.canvas_tasks import ship
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import charge, pack, reserved

Damage = Callable[[Redis, str], object]

MINUTE_MS = 60_000


def put(raw: bytes) -> Damage:
    return lambda redis, name: redis.set(name, raw, px=MINUTE_MS)


def another_type(redis: Redis, name: str) -> None:
    redis.delete(name)
    redis.rpush(name, "no record")
    redis.pexpire(name, MINUTE_MS)


WHOLE = raw_record(b"V", fingerprint=b"", owner=b"", tail=b"json", body=b'{"receipt": "1"}')
HEAD = len(WHOLE) - len(b'{"receipt": "1"}')

#: Values that are not a record, and records whose result is damaged.
UNREADABLE: dict[str, Damage] = {
    "half a head": put(WHOLE[: HEAD // 2]),
    "a list": another_type,
    "of a newer version": put(raw_record(b"Z")),
}
PICKLED = raw_record(b"V", fingerprint=b"", owner=b"", tail=b"pickle", body=b"\x80\x04N.")
UNREADABLE_RESULT = {"cut short": put(WHOLE[:-1]), "of a type that is not accepted": put(PICKLED)}

damages = pytest.mark.parametrize("damage", [*UNREADABLE, *UNREADABLE_RESULT])


def damaged(shop: Shop, task: Any, damage: str, *args: Any) -> str:
    """Stores a damaged record for the key of a call; returns its name in Redis."""
    name = f"idem:{task.idempotency_key_of(*args)}"
    ({**UNREADABLE, **UNREADABLE_RESULT})[damage](shop.redis, name)
    return name


@damages
def test_task_fails_until_the_key_is_forgotten(shop: Shop, order: str, damage: str) -> None:
    name = damaged(shop, pack, damage, order)
    before = shop.redis.dump(name)

    with pytest.raises(CorruptRecordError) as caught:
        pack.delay(order).get(timeout=SOON)

    assert f"of {pack.idempotency_key_of(order)} cannot be read" in str(caught.value)
    if damage in UNREADABLE:
        with pytest.raises(CorruptRecordError, match="forget the key to start afresh"):
            pack.idempotency_record(order)
    assert len(str(caught.value)) < 250
    assert shop.ledger.runs(order) == []
    assert shop.redis.dump(name) == before, "the damaged record is kept"
    shop.wait_until_empty()

    assert pack.idempotency_forget(order) is True
    assert pack.delay(order).get(timeout=SOON)["receipt"]
    assert len(shop.ledger.runs(order)) == 1


@damages
def test_publish_fails_and_sends_no_message(shop: Shop, order: str, damage: str) -> None:
    damaged(shop, reserved, damage, order)

    publish = reserved.s(order).set(queue="unconsumed").delay
    with pytest.raises(CorruptRecordError, match="cannot be read"):
        publish() if damage in UNREADABLE else publish().get(timeout=SOON)
    assert shop.redis.llen("unconsumed") == 0


@pytest.mark.parametrize("damage", ["half a head", "a list"])
def test_caller_gets_the_result_if_the_record_is_damaged_meanwhile(
    shop: Shop, ledger: Ledger, order: str, damage: str
) -> None:
    result = ledger.start(charge, order)
    name = damaged(shop, charge, damage, order)
    ledger.release(order)

    assert result.get(timeout=SOON)["receipt"]
    assert shop.redis.exists(name), "the damaged record is kept"
    with pytest.raises(CorruptRecordError):
        charge.delay(order).get(timeout=SOON)
    assert len(ledger.runs(order)) == 1


def test_damaged_steps_do_not_run_again(shop: Shop, ledger: Ledger, order: str) -> None:
    ship.delay(order, "book", "error").get(timeout=SOON, propagate=False)
    name = f"idem:{ship.idempotency_key_of(order, 'book', 'error')}"
    shop.redis.set(name, shop.redis.get(name)[:-3], keepttl=True)

    with pytest.raises(CorruptRecordError, match=r"the steps of .* cannot be read"):
        ship.delay(order, "book", "error").get(timeout=SOON)
    assert ledger.notes(order) == ["charge", "book"]

    assert ship.idempotency_forget(order, "book", "error")
    assert ship.delay(order, "book").get(timeout=SOON)
