"""References lead from the task id of a duplicate to the record that it met."""

from __future__ import annotations

import threading

import pytest
from redis import Redis

from celery_idempotent.core.store import record_store, reference
from celery_idempotent.core.store.reference import Reference
from celery_idempotent.errors import StoreUnavailableError
from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.store import deployments
from tests.store.record_harness import FIRST, RETENTION_MS, SECOND, Harness, narrow_user, store_at
from tests.waiting import eventually

one_server = deployments.on(deployments.PLAIN[0])


def refer(harness: Harness, task_id: str = SECOND, *, end: str = "r") -> None:
    record = harness.record()
    harness.store.refer(reference.command("idem", task_id, record, end, RETENTION_MS))


def written(harness: Harness, task_id: str = SECOND) -> Reference:
    """Returns the reference as soon as the server has it: nobody has waited for that."""
    eventually(lambda: harness.store.reference(task_id) is not None)
    found = harness.store.reference(task_id)
    assert found is not None
    return found


@pytest.mark.core
def test_a_duplicate_leads_to_the_record_that_it_met(harness: Harness) -> None:
    token = harness.started(task_id=FIRST).token
    refer(harness, end="c")
    assert written(harness) == Reference(str(harness.key), "c", FIRST, token, 1)

    harness.complete(token)
    refer(harness)

    eventually(lambda: written(harness).replayed)
    assert written(harness) == Reference(str(harness.key), "r", FIRST, token, 1)
    assert harness.store.reference(FIRST) is None
    # The connection goes on with the reply of its own commands.
    assert harness.begin(task_id=SECOND).case == "finished"
    assert harness.complete(token).case == "ok"


@one_server
def test_it_expires_with_the_record(harness: Harness) -> None:
    harness.completed()
    refer(harness)
    written(harness)

    pipeline = harness.client.pipeline(transaction=True)
    pipeline.pttl(reference.name("idem", SECOND)).pttl(harness.name)
    left, left_of_record = pipeline.execute()
    assert left_of_record - 5 <= left <= left_of_record


@one_server
def test_its_name_and_value_hold_no_task_id_of_the_duplicate(harness: Harness) -> None:
    harness.completed(task_id="first")
    refer(harness, "mail to bob@example.com")
    written(harness, "mail to bob@example.com")

    for name in harness.client.scan_iter():
        assert b"bob" not in name
        assert b"bob" not in harness.client.get(name)


class TestWriting:
    def test_waits_for_no_reply(self, proxied: Harness, proxy: Proxy) -> None:
        proxied.completed()
        replies = threading.Event()
        proxy.delay_reply("idem:@", 0, after=replies)

        refer(proxied)  # the reply comes only after this

        assert len(proxy.requests_with("idem:@")) <= 1
        replies.set()
        assert proxied.begin(task_id=SECOND).case == "finished"
        written(proxied)

    def test_a_lost_reply_is_not_taken_for_another_one(self, proxy: Proxy, client: Redis) -> None:
        harness = Harness(store_at(proxy.url, timeout=1.0), client)
        harness.completed()
        proxy.swallow_reply("idem:@")

        refer(harness)

        assert harness.begin(task_id=SECOND).case == "finished"
        assert proxy.pending == 0

    def test_a_closed_connection_is_no_error(self, proxied: Harness, proxy: Proxy) -> None:
        proxied.completed()
        proxy.cut()

        refer(proxied)
        refer(proxied)

        assert proxied.begin(task_id=SECOND).case == "finished"

    def test_a_redis_that_is_away_is_tried_again_later(
        self, proxied: Harness, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        proxied.completed()
        now = record_store.monotonic()
        monkeypatch.setattr(record_store, "monotonic", lambda: now)
        record = proxied.record()
        proxy.refuse()
        store = store_at(proxy.url)
        command = reference.command("idem", SECOND, record, "r", RETENTION_MS)
        store.refer(command)
        proxy.heal()

        store.refer(command)
        assert proxy.requests_with("idem:@") == []

        now += record_store.RETRY_REFERENCES_AFTER
        store.refer(command)
        written(proxied)

    def test_errors_are_ignored(self, harness: Harness, server: RedisServer, client: Redis) -> None:
        with narrow_user(harness, server.url, keys=["idem:shop*", "idem:{idem:shop*"]) as url:
            narrow = Harness(store_at(url), client)
            narrow.completed()

            refer(narrow)

            assert narrow.begin(task_id=SECOND).case == "finished"
            with pytest.raises(StoreUnavailableError):
                narrow.store.reference(SECOND)


@one_server
@pytest.mark.parametrize("damage", [b"", b"x", b"r", b"r" * 11, b"?" * 60, b"r" + b"\xff" * 60])
def test_a_damaged_reference_counts_as_none(harness: Harness, damage: bytes) -> None:
    harness.client.set(reference.name("idem", SECOND), damage, px=1000)

    assert harness.store.reference(SECOND) is None


@one_server
def test_a_reference_costs_less_than_half_of_celerys_result(harness: Harness) -> None:
    harness.completed()
    refer(harness)
    written(harness)

    used = harness.client.memory_usage(reference.name("idem", SECOND))

    assert used <= 212  # Celery's result of a duplicate takes 424
