"""A process is killed at each point of a call: one effect, and one outcome for every caller.

No message that a body publishes on commit is lost; and a call that has ended is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery.result import AsyncResult

from celery_idempotent import PoisonedTaskError
from tests.sql.conftest import LIBRARIES_AND_KINDS, case, run_celery
from tests.sql.harness import Shop, StartShop
from tests.sql.shop import POINTS, breakpoint_of
from tests.waiting import SOON, eventually

#: Where the row of an error is written, after the rollback of the effects.
ERROR_POINTS = ("row claimed", "outcome written", "committed")
#: Where a process that has messages to publish dies.
PUBLISHING = ("outcome written", "before on_commit", "committed", "published", "record completed")

pytestmark = pytest.mark.worker
each_library_and_kind = pytest.mark.parametrize("shop", LIBRARIES_AND_KINDS, indirect=True)
each_kind_with_django = pytest.mark.parametrize(
    "shop", [each for each in LIBRARIES_AND_KINDS if "django" in each.values[0]], indirect=True
)
postgresql = pytest.mark.parametrize("shop", [case("sqlalchemy", "postgresql")], indirect=True)


@pytest.fixture(scope="module")
def shop(request: pytest.FixtureRequest, start_shop: StartShop) -> Iterator[Shop]:
    with start_shop(*request.param) as shop:
        yield shop


def kill_at_each(
    shop: Shop, points: tuple[str, ...], call: Callable[[str], AsyncResult]
) -> Iterator[tuple[str, str, Any, Any]]:
    """Calls with one order for each point, all at once: Celery replaces dead processes every 5 s.

    Yields the point, the order, and what a caller and that of a duplicate get.
    """
    orders = {point: uuid4().hex for point in points}
    for point, order in orders.items():
        breakpoint_of(shop.breakpoints, order, point).touch()
    results = {point: call(order) for point, order in orders.items()}
    firsts = {p: result.get(timeout=SOON, propagate=False) for p, result in results.items()}
    for point, order in orders.items():
        assert shop.was_killed(order, point)
        duplicate = call(order).get(timeout=SOON, propagate=False)
        yield point, order, firsts[point], duplicate


@each_library_and_kind
def test_effects_happen_once_and_all_callers_get_one_outcome(shop: Shop) -> None:
    for point, order, first, duplicate in kill_at_each(shop, POINTS, shop.charge):
        assert shop.database.effects(order) == 1, point
        assert isinstance(first, str), point
        assert duplicate == first, point


@each_library_and_kind
def test_an_error_that_ends_the_key_has_no_effect_and_all_callers_get_it(shop: Shop) -> None:
    def decline(order: str) -> AsyncResult:
        return shop.charge(order, "decline")

    for point, order, first, duplicate in kill_at_each(shop, ERROR_POINTS, decline):
        assert shop.database.effects(order) == 0, point
        assert type(first).__name__ == "Declined", point
        assert duplicate.args == first.args, point


@each_kind_with_django
def test_a_process_that_is_killed_loses_no_message(shop: Shop) -> None:
    def charge_and_notify(order: str) -> AsyncResult:
        return shop.app.send_task("sql_shop.charge_and_notify", (order, f"note {order}"))

    def notes(order: str) -> int:
        return shop.database.effects(f"note {order}")

    orders = []
    for point, order, first, duplicate in kill_at_each(shop, PUBLISHING, charge_and_notify):
        assert duplicate == first, point
        assert shop.database.effects(order) == 1, point
        eventually(lambda order=order: notes(order), f"after {point}")
        orders.append(order)
    # No message is left that would write another one.
    charge_and_notify("last").get(timeout=SOON)
    eventually(lambda: notes("last"))
    assert [notes(order) for order in orders] == [1] * len(PUBLISHING)


class TestRerun:
    def rerun(self, shop: Shop, result: AsyncResult) -> int:
        """Runs the command; returns its exit code."""
        command = ("idempotency", "rerun", result.id, "--yes")
        code: int = run_celery(shop.server, shop.database, "sqlalchemy", *command).returncode
        return code

    @postgresql
    def test_the_row_of_an_error_is_forgotten(self, shop: Shop, order: str) -> None:
        result = shop.charge(order, "decline")
        eventually(lambda: result.failed(), "it is declined")

        assert self.rerun(shop, result) == 0

        shop.wait_for_start(order, 2)
        shop.wait_for_log("has been run again")
        assert shop.database.effects(order) == 0

    @postgresql
    def test_a_poisoned_task_writes_its_effect_once(self, shop: Shop, order: str) -> None:
        breakpoint_of(shop.breakpoints, order, "effect written").touch()
        result = shop.charge(order, name="charge_with_one_try")
        with pytest.raises(PoisonedTaskError):
            result.get(timeout=SOON)

        copies = shop.logs().count("gets the outcome of task")
        shop.workers[0].kill("SIGSTOP")
        assert [self.rerun(shop, result) for _ in range(2)] == [0, 0]
        shop.workers[0].kill("SIGCONT")

        eventually(lambda: shop.app.AsyncResult(result.id).successful(), "it succeeds")
        logs = shop.logs
        eventually(lambda: logs().count("gets the outcome of task") > copies, "one is a copy")
        assert shop.database.effects(order) == 1
