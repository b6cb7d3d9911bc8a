"""The start of a worker: its log and exit code for unreachable stores and invalid settings."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_idempotent.testing.server import RedisServer
from tests.waiting import SOON
from tests.worker.harness import Shop
from tests.worker.tasks import pack

pytestmark = pytest.mark.worker

#: No server listens on this port.
UNREACHABLE = "redis://:secret@127.0.0.1:1/0"


def lines_about_the_store(log: str) -> list[str]:
    return [line for line in log.splitlines() if "record store" in line]


class TestUnreachableStore:
    """``idempotency_on_store_unavailable_at_start``."""

    def test_is_logged_without_its_password(self, open_shop: Callable[..., Shop]) -> None:
        with open_shop(
            idempotency_redis_url=UNREACHABLE, idempotency_on_store_unavailable_at_start="continue"
        ) as shop:
            log = shop.start_worker(concurrency=1).logs()

        (line,) = lines_about_the_store(log)
        assert "ERROR" in line
        assert "cannot be reached" in line
        assert "this worker starts without it" in line
        assert "Traceback" not in log
        assert "secret" not in log

    @pytest.mark.exhaustive
    def test_worker_waits_by_default(self, open_shop: Callable[..., Shop], order: str) -> None:
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

    def test_worker_exits_if_configured(self, open_shop: Callable[..., Shop]) -> None:
        with open_shop(
            idempotency_redis_url=UNREACHABLE, idempotency_on_store_unavailable_at_start="exit"
        ) as shop:
            worker = shop.start_worker(ready=False)

            assert worker.wait_for_exit() != 0
            assert "this worker exits" in lines_about_the_store(worker.logs())[-1]
            assert "Traceback" not in worker.logs()


@pytest.mark.exhaustive
def test_wait_aof_without_support_ends_the_worker(
    open_shop: Callable[..., Shop],
) -> None:
    with open_shop(idempotency_wait_aof=True) as shop:
        worker = shop.start_worker(ready=False)

        assert worker.wait_for_exit() != 0
        assert "Error: idempotency_wait_aof needs" in worker.logs().splitlines()[-1]
        assert "Traceback" not in worker.logs()


@pytest.mark.exhaustive
def test_reachable_store_is_not_logged(open_shop: Callable[..., Shop]) -> None:
    with open_shop() as shop:
        assert lines_about_the_store(shop.start_worker(concurrency=1).logs()) == []


@pytest.mark.exhaustive
def test_missing_redis_url_ends_the_worker(open_shop: Callable[..., Shop]) -> None:
    with open_shop(broker_url="memory://", result_backend="cache+memory://") as shop:
        worker = shop.start_worker(ready=False)

        assert worker.wait_for_exit() != 0
        assert "idempotency_redis_url is not set" in worker.logs().splitlines()[-1]
        assert "Traceback" not in worker.logs()


def test_unknown_setting_ends_the_worker(open_shop: Callable[..., Shop]) -> None:
    with open_shop(idempotency_leese=5) as shop:
        worker = shop.start_worker(ready=False)

        assert worker.wait_for_exit() != 0
        assert "did you mean idempotency_lease?" in worker.logs().splitlines()[-1]
        assert "Traceback" not in worker.logs()
