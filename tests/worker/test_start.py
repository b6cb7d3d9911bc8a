"""What a worker says at its start about the store that its tasks need."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_idempotent.testing.server import RedisServer
from tests.waiting import SOON
from tests.worker.harness import Shop
from tests.worker.shop import pack

pytestmark = pytest.mark.worker

#: Nothing listens there.
NOWHERE = "redis://:secret@127.0.0.1:1/0"


def lines_about_the_store(log: str) -> list[str]:
    return [line for line in log.splitlines() if "record store" in line]


class TestAnUnreachableStore:
    """``idempotency_on_store_unavailable_at_start``."""

    def test_is_one_clear_line_without_its_password(self, open_shop: Callable[..., Shop]) -> None:
        with open_shop(
            idempotency_redis_url=NOWHERE, idempotency_on_store_unavailable_at_start="continue"
        ) as shop:
            log = shop.start_worker(concurrency=1).logs()

        (line,) = lines_about_the_store(log)
        assert "ERROR" in line
        assert "cannot be reached" in line
        assert "this worker starts without it" in line
        assert "Traceback" not in log
        assert "secret" not in log

    def test_is_waited_for(self, open_shop: Callable[..., Shop], order: str) -> None:
        with RedisServer.start(config={}) as store:
            store.kill()
            with open_shop(idempotency_redis_url=store.url) as shop:
                result = pack.delay(order)
                worker = shop.start_worker(concurrency=1, ready=False)
                worker.wait_for_log("this worker waits for it", "")
                assert shop.ledger.runs(order) == []
                store.restart()

                assert result.get(timeout=SOON)["receipt"]
                assert "is available again" in lines_about_the_store(worker.logs())[-1]

    def test_ends_the_worker_where_that_is_wanted(self, open_shop: Callable[..., Shop]) -> None:
        with open_shop(
            idempotency_redis_url=NOWHERE, idempotency_on_store_unavailable_at_start="exit"
        ) as shop:
            worker = shop.start_worker(ready=False)

            assert worker.wait_for_exit() != 0
            assert "this worker exits" in lines_about_the_store(worker.logs())[-1]
            assert "Traceback" not in worker.logs()


def test_a_store_that_cannot_wait_for_its_disk_ends_the_worker_in_one_line(
    open_shop: Callable[..., Shop],
) -> None:
    with open_shop(idempotency_wait_aof=True) as shop:
        worker = shop.start_worker(ready=False)

        assert worker.wait_for_exit() != 0
        assert "Error: idempotency_wait_aof needs" in worker.logs().splitlines()[-1]
        assert "Traceback" not in worker.logs()


def test_a_store_that_answers_is_no_line(open_shop: Callable[..., Shop]) -> None:
    with open_shop() as shop:
        assert lines_about_the_store(shop.start_worker(concurrency=1).logs()) == []


def test_no_redis_at_all_ends_the_worker_in_one_line(open_shop: Callable[..., Shop]) -> None:
    with open_shop(broker_url="memory://", result_backend="cache+memory://") as shop:
        worker = shop.start_worker(ready=False)

        assert worker.wait_for_exit() != 0
        assert "idempotency_redis_url is not set" in worker.logs().splitlines()[-1]
        assert "Traceback" not in worker.logs()


def test_a_wrong_setting_ends_the_worker_in_one_line(open_shop: Callable[..., Shop]) -> None:
    with open_shop(idempotency_leese=5) as shop:
        worker = shop.start_worker(ready=False)

        assert worker.wait_for_exit() != 0
        assert "did you mean idempotency_lease?" in worker.logs().splitlines()[-1]
        assert "Traceback" not in worker.logs()
