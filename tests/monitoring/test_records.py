"""`Idempotency.records` and `records`, which scan all records."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from redis import Redis

from celery_idempotent import Idempotency, Record, ResultNotStoredError, State
from celery_idempotent.core.store import scan
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.server_info import distinct
from celery_idempotent.dashboard.index import Query
from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.operations.records.query import records
from celery_idempotent.operations.records.reader import RecordReader
from tests.monitoring.conftest import Shop, copy, list_json
from tests.servers.groups import ClusterServers
from tests.store.record_harness import raw_record


def list_records(shop: Shop, **conditions: Any) -> list[Record]:
    return list(records(shop.stores, **conditions))


def test_a_scanned_record_equals_one_that_is_read_by_key(shop: Shop) -> None:
    shop.charge.apply((42, 999))

    (record,) = list_records(shop)

    expected = shop.charge.idempotency_record(42, 999)
    assert record.expires_at == pytest.approx(expected.expires_at, abs=timedelta(seconds=1))
    for name in ("token", "task_id", "started_at", "finished_at"):
        assert getattr(record, name) == getattr(expected, name)
    assert record.result == {"order": 42, "amount": 999}


def test_records_are_filtered_by_state_and_task(shop: Shop) -> None:
    shop.charge.apply((1, 999))
    shop.charge.apply((2, 13))
    shop.begin(shop.charge, 3, 999)
    shop.begin(shop.pack, 3)

    assert [record.state for record in list_records(shop, state="FAILED")] == [State.FAILED]
    started = [record.task for record in list_records(shop, state=State.STARTED)]
    assert sorted(started) == ["shop.charge", "shop.pack"]
    assert len(list_records(shop, task="shop.charge")) == 3
    assert [r.task for r in list_records(shop, task="shop.pack", state="STARTED")] == ["shop.pack"]
    assert list_records(shop, task="shop.char") == []
    with pytest.raises(ValueError, match="GONE"):
        list_records(shop, state="GONE")


def test_records_are_filtered_by_age(shop: Shop) -> None:
    ended_ms = int((time.time() - 90) * 1000)
    old = raw_record(b"V", at_ms=ended_ms, tail=b"json", body=b"1")
    shop.client.set(f"idem:{shop.charge.idempotency_key_of(1, 999)}", old, px=60_000)
    shop.begin(shop.charge, 2, 999)

    for age in (60, timedelta(seconds=60)):
        assert [record.state for record in list_records(shop, older_than=age)] == [State.COMPLETED]
    assert len(list_records(shop, older_than=timedelta(0))) == 2
    assert list_records(shop, older_than=120) == []


def test_names_that_are_not_records_and_unreadable_ones_are_left_out(shop: Shop) -> None:
    shop.charge.apply((1, 999))
    for name in ("idem", "idem:", "idem:shop.charge:short", "idem:other:shop.charge:" + "x" * 22):
        shop.client.set(name, "something else")
    shop.client.set("ownXX:shop.pack:" + "x" * 22, "matches the prefix own?* as a pattern")
    shop.client.set("idem:shop.charge:" + "x" * 22, "Znewer")
    shop.client.rpush("idem:shop.charge:" + "y" * 22, "another kind")

    assert len(list_records(shop)) == 1


def test_a_call_without_a_message_stores_no_error(shop: Shop) -> None:
    """Its task id is unique, so no duplicate could replay the error."""

    def lose() -> None:
        raise ValueError("lost")

    lose = shop.add_task(lose, "shop.lose")
    assert lose.apply().state == "FAILURE"
    with pytest.raises(ValueError, match="lost"):
        Idempotency(shop.app).idempotent(lose.run, name="shop.lose")()

    assert shop.client.dbsize() == 0


def test_a_large_result_is_fetched_on_access(shop: Shop) -> None:
    shop.pack.apply((1, 5_000))
    received = bytes_sent(shop.client)

    (record,) = list_records(shop)

    assert bytes_sent(shop.client) - received < 5_000
    (other,) = list_records(shop)
    assert record.result == "x" * 5_000
    shop.pack.idempotency_forget(1, 5_000)
    shop.begin(shop.pack, 1, 5_000)
    with pytest.raises(ResultNotStoredError, match="has changed: read it again"):
        _ = other.result


@pytest.mark.parametrize("task_id", ["long" * 250, "short"], ids=len)
def test_a_scan_never_reads_a_large_value(shop: Shop, task_id: str) -> None:
    shop.pack.apply((1, 5_000), task_id=task_id)
    raw = shop.client.get(f"own?*:{shop.pack.idempotency_key_of(1, 5_000)}")
    head = raw[: raw.index(b"xxx")]
    for number in range(20):
        shop.client.set(f"own?*:shop.pack:{number:022d}", head + b"x" * 2_000_000)
        shop.client.set(f"idem:shop.charge:{number:022d}", b"Z" * 2_000_000)
    received = bytes_sent(shop.client)

    listed = shop.celery("list")

    assert (listed.count("COMPLETED"), listed.count("CORRUPT")) == (21, 20)
    assert bytes_sent(shop.client) - received < 20 * 70_000


def test_many_records_are_scanned_in_pages_without_the_command_keys(shop: Shop) -> None:
    copy(shop, 2_000)
    shop.client.config_resetstat()
    scanned = records(shop.stores, task="shop.charge")

    next(scanned)
    assert shop.client.info("commandstats")["cmdstat_scan"]["calls"] == 1

    assert len(list(scanned)) >= 2_000
    stats = shop.client.info("commandstats")
    assert "cmdstat_keys" not in stats
    assert stats["cmdstat_scan"]["calls"] >= 4
    assert shop.client.slowlog_len() == 0


@pytest.mark.exhaustive
def test_all_nodes_of_a_cluster_are_scanned(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop.charge.apply((1, 999))
    raw = shop.client.get(f"idem:{shop.charge.idempotency_key_of(1, 999)}")
    config = {"cluster-require-full-coverage": "no"}
    with ClusterServers.start(config=config) as cluster, cluster.client() as client:
        names = {f"idem:shop.charge:{number:022d}" for number in range(200)}
        for name in names:
            client.set(name, raw, px=60_000)
        engine = Idempotency(cluster.url)

        listed = list(engine.records(state="COMPLETED", task="shop.charge"))

        assert {f"idem:{record.key}" for record in listed} == names
        with RecordReader.open(engine.executor.store) as reader:
            keys = [found.key for page in reader.scan() for found in page]
            assert len(reader.get(keys)) == len(reader.bytes_used(keys)) == 200
            infos = dict(reader.server_infos())
            assert [info["connected_slaves"] for info in infos.values()] == [1, 1, 1]
            assert [info["write_error"] for info in infos.values()] == ["", "", ""]
            other = RecordStore(StoreConfig(client=client), repr)
            assert distinct([engine.executor.store, other]) == [engine.executor.store]

        with engine.execution("large") as execution:
            execution.complete("x" * 2_000)
        (large,) = list(engine.records(task=engine.name))
        assert large.result == "x" * 2_000, "fetched after the scan has ended"

        check_tools_with_a_hanging_node(cluster, names, engine, caplog)
        engine.close()


def check_tools_with_a_hanging_node(
    cluster: ClusterServers, names: set[str], engine: Idempotency, caplog: Any
) -> None:
    hanging = cluster.master_of(next(iter(names)))
    others = {name for name in names if cluster.master_of(name) is not hanging}
    node = f"127.0.0.1:{hanging.port}"
    store = engine.executor.store
    other = cluster.other_master(next(iter(names)))
    with other.client() as client:
        client.config_set("min-replicas-to-write", 2)
    hanging.pause()
    try:
        with RecordReader.open(store, timeout=1) as reader:
            found = [view.key for page in reader.scan() for view in page]
            assert {store.name(key) for key in found} >= others
            keys = [scan.key_of(name, "idem") for name in names]
            assert {store.name(key) for key in reader.get(keys)} == others
            infos = dict(reader.server_infos())
    finally:
        hanging.resume()
    assert node in caplog.text
    assert isinstance(infos.pop(node), StoreUnavailableError)
    assert "NOREPLICAS" in infos.pop(f"127.0.0.1:{other.port}")["write_error"]
    assert [info["write_error"] for info in infos.values()] == [""]


def test_an_engine_lists_its_own_records_and_those_of_its_app(shop: Shop) -> None:
    engine = Idempotency(shop.app)

    @engine.idempotent(name="add")
    def add(left: int, right: int) -> int:
        return left + right

    add(1, 2)
    shop.charge.apply((1, 999))
    shop.pack.apply((1,))

    results = {record.task: record.result for record in engine.records()}

    assert results.pop("shop.charge") == {"order": 1, "amount": 999}
    assert results.pop("shop.pack") == "x"
    assert list(results.values()) == [3]


def bytes_sent(client: Redis) -> int:
    """Returns how many bytes the server has sent to all clients."""
    sent: int = client.info("stats")["total_net_output_bytes"]
    return sent


class TestTasksWithOptionsOfTheirOwn:
    """They share a server, a database and a prefix, and so their records."""

    @pytest.fixture(autouse=True)
    def calls(self, shop: Shop, tmp_path: Path) -> None:
        """A call of each task; only its own options decode its result."""

        def body() -> str:
            return "own"

        port = shop.url.rpartition(":")[2]
        options: list[dict[str, Any]] = [
            {"encryption_keys": [Fernet.generate_key().decode()]},
            {"redis_timeout": 7.0},
            {"redis_url": f"redis://localhost:{port}"},
            {"redis_url": f"{shop.url}?db=0"},
            {"redis_client": shop.client},
        ]
        for name, own in zip(self.names, options, strict=True):
            shop.add_task(body, name, **own).apply()
        shop.add_offloading_task(tmp_path).apply()

    names = ("shop.hide", "shop.wait", "shop.alias", "shop.db", "shop.client")
    results = dict.fromkeys(names, "own") | {"shop.scan": "x" * 1_000}

    def test_are_listed_once_and_decoded_by_their_own_task(self, shop: Shop) -> None:
        assert len(list_json(shop)) == len(self.results)
        assert {record.task: record.result for record in list_records(shop)} == self.results
        engine = Idempotency(shop.app, encryption_keys=[Fernet.generate_key()])
        assert len(list(engine.records())) == len(self.results)
        for record in list_records(shop):
            assert shop.json("show", record.task_id)["result"] == record.result

    def test_are_counted_once(self, shop: Shop) -> None:
        tasks = shop.json("stats", "--timeout", "0")["tasks"]

        assert sorted(tasks) == sorted(self.results)
        assert {task["records"] for task in tasks.values()} == {1}

    @pytest.mark.parametrize("name", results)
    def test_are_forgotten_once(self, shop: Shop, name: str, tmp_path: Path) -> None:
        output = shop.json("forget", "--task", name, "--yes")

        assert [record["case"] for record in output] == ["forgotten"]
        assert name != "shop.scan" or not list(tmp_path.iterdir())

    def test_are_one_record_in_the_index_of_the_dashboard(self, shop: Shop) -> None:
        with shop.index() as index:
            for view in index.page(Query(), 50):
                task = shop.app.tasks[view.key.task]
                index.read(task.idempotency_configuration.executor.store, [view.key])

            assert index.totals().keys() == self.results.keys()
            assert {found.states.total() for found in index.totals().values()} == {1}
            assert len(index.page(Query(), 50)) == len(self.results)
