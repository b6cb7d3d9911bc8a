"""All records, gone over by SCAN."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from redis import Redis

from celery_idempotent import Idempotency, IdempotentTask, Record, ResultNotStoredError, State
from celery_idempotent.configuration import app_tasks
from celery_idempotent.record.payload import Payload
from celery_idempotent.store import commands
from celery_idempotent.store.record_query import records
from tests.monitoring.conftest import Shop
from tests.servers.cluster import ClusterServers


def of(shop: Shop, **choice: Any) -> list[Record]:
    return list(records(app_tasks.stores(app_tasks.tasks(shop.app)), **choice))


def test_are_those_of_all_tasks_wherever_these_keep_them(shop: Shop) -> None:
    for number in range(3):
        shop.charge.apply((number, 999))
    shop.pack.apply((1,))

    found = of(shop)

    assert sorted(record.task for record in found) == ["shop.charge"] * 3 + ["shop.pack"]
    assert all(record.state is State.COMPLETED for record in found)
    assert {record.key for record in found if record.task == "shop.charge"} == {
        str(shop.charge.idempotency_key_of(number, 999)) for number in range(3)
    }


def test_are_as_a_look_up_has_them(shop: Shop) -> None:
    shop.charge.apply((42, 999))

    (found,) = of(shop)

    looked_up = shop.charge.idempotency_record(42, 999)
    assert found.expires_at == pytest.approx(looked_up.expires_at, abs=timedelta(seconds=1))
    assert (found.token, found.task_id, found.started_at, found.finished_at) == (
        looked_up.token,
        looked_up.task_id,
        looked_up.started_at,
        looked_up.finished_at,
    )
    assert found.result == {"order": 42, "amount": 999}


def test_by_state_and_task(shop: Shop) -> None:
    shop.charge.apply((1, 999))
    shop.charge.apply((2, 13))
    shop.begin(shop.charge, 3, 999)
    shop.begin(shop.pack, 3)

    assert [record.state for record in of(shop, state="FAILED")] == [State.FAILED]
    assert {record.task for record in of(shop, state=State.STARTED)} == {"shop.charge", "shop.pack"}
    assert len(of(shop, task="shop.charge")) == 3
    assert [r.task for r in of(shop, task="shop.pack", state="STARTED")] == ["shop.pack"]
    assert of(shop, task="shop.char") == []
    with pytest.raises(ValueError, match="GONE"):
        of(shop, state="GONE")


def test_by_age(shop: Shop) -> None:
    shop.charge.apply((1, 999))
    time.sleep(1.5)
    shop.begin(shop.charge, 2, 999)

    (old,) = of(shop, older_than=1.5)

    assert old.state is State.COMPLETED
    assert len(of(shop, older_than=timedelta(0))) == 2
    assert of(shop, older_than=60) == []


def test_what_others_keep_there_is_not_taken_for_records(shop: Shop) -> None:
    shop.charge.apply((1, 999))
    for name in ("idem", "idem:", "idem:shop.charge:short", "idem:other:shop.charge:" + "x" * 22):
        shop.client.set(name, "something else")
    shop.client.set("ownXX:shop.pack:" + "x" * 22, "matches the prefix own?* as a pattern")

    assert len(of(shop)) == 1


def test_a_key_that_an_error_has_freed_has_none(shop: Shop) -> None:
    key = shop.begin(shop.charge, 42, 999)
    store = shop.charge.idempotency_configuration.executor.store
    record = store.get(key)
    assert record is not None
    error = Payload("json", b'{"exc_type": "ValueError"}')
    store.execute(
        commands.release(key, record.token, hold_ms=0, retention_ms=1, error=error, error_ms=60_000)
    )

    assert shop.client.exists(store.name(key))
    assert of(shop) == []
    assert "is absent" in shop.celery("show", str(key), code=1)
    assert shop.json("stats", "--timeout", "0")["tasks"] == {}


def test_a_call_without_a_message_leaves_no_error(shop: Shop) -> None:
    """Nobody else has its task id."""

    def lose() -> None:
        raise ValueError("lost")

    lose = shop.app.task(lose, base=IdempotentTask, shared=False, lazy=False, name="shop.lose")
    assert lose.apply().state == "FAILURE"
    with pytest.raises(ValueError, match="lost"):
        Idempotency(shop.app).idempotent(lose.run)()

    assert shop.client.dbsize() == 0


def test_what_cannot_be_read_is_left_out(shop: Shop) -> None:
    shop.charge.apply((1, 999))
    shop.client.set("idem:shop.charge:" + "x" * 22, "Znewer")
    shop.client.rpush("idem:shop.charge:" + "y" * 22, "another kind")

    assert len(of(shop)) == 1


def test_a_large_result_is_fetched_when_it_is_asked_for(shop: Shop) -> None:
    shop.pack.apply((1, 5_000))
    received = bytes_sent(shop.client)

    (found,) = of(shop)

    assert bytes_sent(shop.client) - received < 5_000
    assert found.result == "x" * 5_000


def test_a_large_result_that_is_gone_meanwhile_is_told_so(shop: Shop) -> None:
    shop.pack.apply((1, 5_000))
    (found,) = of(shop)
    shop.pack.idempotency_forget(1, 5_000)
    shop.begin(shop.pack, 1, 5_000)

    with pytest.raises(ResultNotStoredError, match="changed meanwhile"):
        _ = found.result


def test_a_task_id_longer_than_the_head_is_read_whole(shop: Shop) -> None:
    shop.charge.apply((1, 999), task_id="long" * 300)

    (found,) = of(shop)

    assert found.task_id == "long" * 300
    assert found.result == {"order": 1, "amount": 999}


def test_many_take_pages_and_never_keys(shop: Shop) -> None:
    shop.charge.apply((1, 999))
    copy(shop, 2_000)
    shop.client.config_resetstat()

    assert len(of(shop, task="shop.charge")) >= 2_001

    stats = shop.client.info("commandstats")
    assert "cmdstat_keys" not in stats
    assert stats["cmdstat_scan"]["calls"] >= 4
    assert shop.client.slowlog_len() == 0


def test_the_first_ones_do_not_wait_for_the_last(shop: Shop) -> None:
    shop.charge.apply((1, 999))
    copy(shop, 5_000)
    shop.client.config_resetstat()

    next(records(app_tasks.stores(app_tasks.tasks(shop.app))))

    assert shop.client.info("commandstats")["cmdstat_scan"]["calls"] == 1


def test_of_a_cluster_are_those_of_all_its_nodes(shop: Shop) -> None:
    shop.charge.apply((1, 999))
    raw = shop.client.get(f"idem:{shop.charge.idempotency_key_of(1, 999)}")
    with ClusterServers.start() as cluster, cluster.client() as client:
        names = {f"idem:shop.charge:{number:022d}" for number in range(200)}
        for name in names:
            client.set(name, raw, px=60_000)
        engine = Idempotency(cluster.url)

        found = list(engine.records(state="COMPLETED", task="shop.charge"))

        assert {f"idem:{record.key}" for record in found} == names
        with engine.executor.store.open_reader() as open_reader:
            keys = [one.key for page in open_reader.scan() for one in page]
            assert len(open_reader.get(keys)) == len(open_reader.bytes_used(keys)) == 200
            assert open_reader.count_names() == 200
            assert open_reader.server_info().replicas == 1

        with engine.execution("large") as execution:
            execution.complete("x" * 2_000)
        (large,) = list(engine.records(task=engine.name))
        assert large.result == "x" * 2_000, "fetched when the look is over"
        engine.close()


def test_of_an_engine_are_its_own_and_those_of_its_app(shop: Shop) -> None:
    engine = Idempotency(shop.app)

    @engine.idempotent
    def add(one: int, two: int) -> int:
        return one + two

    add(1, 2)
    shop.charge.apply((1, 999))
    shop.pack.apply((1,))

    found = {record.task: record.result for record in engine.records()}

    assert found.pop("shop.charge") == {"order": 1, "amount": 999}
    assert found.pop("shop.pack") == "x"
    assert list(found.values()) == [3]


def copy(shop: Shop, times: int) -> None:
    """More records like the one of order 1."""
    raw = shop.client.get(f"idem:{shop.charge.idempotency_key_of(1, 999)}")
    pipeline = shop.client.pipeline(transaction=False)
    for number in range(times):
        pipeline.set(f"idem:shop.charge:{number:022d}", raw, px=3_600_000)
    pipeline.execute()


def bytes_sent(client: Redis) -> int:
    """By the server, to everybody."""
    sent: int = client.info("stats")["total_net_output_bytes"]
    return sent
