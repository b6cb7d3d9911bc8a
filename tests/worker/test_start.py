"""What a worker says at its start about the store that its tasks need."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.worker.harness import Shop

pytestmark = pytest.mark.worker

#: Nothing listens there.
NOWHERE = "redis://:secret@127.0.0.1:1/0"


class TestAnUnreachableStore:
    @pytest.fixture(scope="class")
    @classmethod
    def log(cls, open_shop: Callable[..., Shop]) -> Iterator[str]:
        with open_shop(idempotency_redis_url=NOWHERE) as shop:
            yield shop.start_worker(concurrency=1).logs()

    def test_is_one_clear_line(self, log: str) -> None:
        (line,) = lines_about_the_store(log)
        assert "ERROR" in line
        assert "cannot be reached" in line
        assert "Traceback" not in log

    def test_does_not_tell_the_password(self, log: str) -> None:
        assert "secret" not in log


def lines_about_the_store(log: str) -> list[str]:
    return [line for line in log.splitlines() if "127.0.0.1:1/" in line or "store" in line]


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
