"""The start of a worker: its log and exit code for unreachable stores and invalid settings."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.servers.redis_server import RedisServer
from tests.waiting import SOON
from tests.worker.harness import Shop
from tests.worker.tasks import pack

pytestmark = pytest.mark.worker

#: No server listens on this port.
UNREACHABLE = "redis://:secret@127.0.0.1:1/0"


def lines_about_the_store(log: str) -> list[str]:
    return [line for line in log.splitlines() if "idempotency_on_store_error applies" in line]


class TestUnreachableStore:
    def test_is_logged_without_its_password(self, open_shop: Callable[..., Shop]) -> None:
        with open_shop(idempotency_redis_url=UNREACHABLE) as shop:
            log = shop.start_worker(concurrency=1).logs()

        (line,) = lines_about_the_store(log)
        assert "ERROR" in line
        assert "cannot be reached" in line
        assert "Traceback" not in log
        assert "secret" not in log

    def test_messages_wait_until_it_replies(
        self, open_shop: Callable[..., Shop], order: str
    ) -> None:
        with RedisServer.start(config={}) as store:
            store.kill()
            with open_shop(idempotency_redis_url=store.url) as shop:
                result = pack.delay(order)
                worker = shop.start_worker(concurrency=1)
                worker.wait_for_log("cannot begin", result.id)
                assert shop.ledger.runs(order) == []
                store.restart()

                assert result.get(timeout=SOON)["receipt"]


@pytest.mark.exhaustive
def test_reachable_store_is_not_logged(open_shop: Callable[..., Shop]) -> None:
    with open_shop() as shop:
        assert lines_about_the_store(shop.start_worker(concurrency=1).logs()) == []
