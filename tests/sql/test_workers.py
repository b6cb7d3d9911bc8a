"""Workers whose lease is shorter than a body: frozen, held for long, replaced, and run again."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.conftest import exhaustive_except
from tests.sql.conftest import case
from tests.sql.harness import Shop, StartShop
from tests.sql.shop import breakpoint_of
from tests.waiting import SOON, eventually

CASES = [case("sqlalchemy", "postgresql", kept=True), case("django", "mariadb")]
pytestmark = [pytest.mark.worker, pytest.mark.parametrize("shop", CASES, indirect=True)]

LEASE = 2.0
#: A frozen worker may hold messages of its queue.
FIRST_QUEUE = "first"


@pytest.fixture(scope="module")
def shop(request: pytest.FixtureRequest, start_shop: StartShop) -> Iterator[Shop]:
    options = (("--queues", FIRST_QUEUE), ("--queues", "celery"))
    with start_shop(*request.param, lease=LEASE, workers=2, concurrency=3, options=options) as shop:
        yield shop


@pytest.mark.exhaustive
def test_a_frozen_execution_and_its_successor_have_one_outcome(shop: Shop, order: str) -> None:
    first = shop.start(order, queue=FIRST_QUEUE)
    frozen = shop.workers[0]
    frozen.kill("SIGSTOP")
    try:
        second = shop.charge(order)
        # Its lease expires; the successor waits in the database.
        shop.wait_for_log("takes over from an execution that died")
        shop.release(order)
    finally:
        frozen.kill("SIGCONT")

    shop.assert_charged_once(order, first, second)


@pytest.mark.exhaustive
def test_a_transaction_that_is_longer_than_the_lease(shop: Shop, order: str) -> None:
    began = time.monotonic()
    first = shop.start(order)
    eventually(lambda: time.monotonic() > began + 2 * LEASE, "two leases have passed")
    second = shop.charge(order, queue=FIRST_QUEUE)
    shop.wait_for_log(f"task {second.id} is put back")
    shop.release(order)

    shop.assert_charged_once(order, first, second)


@pytest.mark.parametrize("point", exhaustive_except(["outcome written", "committed"], "committed"))
def test_a_task_that_replaces_itself_and_is_killed(shop: Shop, order: str, point: str) -> None:
    breakpoint_of(shop.breakpoints, order, point).touch()
    results = [shop.app.send_task("sql_shop.charge_in_parts", (order, 2)) for _ in range(2)]
    receipts = {result.get(timeout=SOON) for result in results}

    assert shop.was_killed(order, point)
    assert len(receipts) == 1
    assert shop.database.effects(order) == 3, "one for each part"


@pytest.mark.exhaustive
@pytest.mark.parametrize("until", ["finished", "started"])
def test_a_key_that_runs_again_is_killed_after_commit(shop: Shop, order: str, until: str) -> None:
    def send() -> str:
        receipt: str = shop.app.send_task(f"sql_shop.until_{until}", (order,)).get(timeout=SOON)
        return receipt

    breakpoint_of(shop.breakpoints, order, "committed").touch()
    killed = send()
    assert shop.was_killed(order, "committed")
    assert shop.database.effects(order) == 1, "the copy of the message has found its row"
    assert send() != killed
    assert shop.database.effects(order) == 2
