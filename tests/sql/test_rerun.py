"""Running a call again whose outcome is in a row, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery.result import AsyncResult

from celery_idempotent import PoisonedTaskError
from tests.sql.conftest import run_celery
from tests.sql.harness import Shop
from tests.sql.shop import breakpoint_of
from tests.waiting import SOON, eventually

pytestmark = [pytest.mark.exhaustive, pytest.mark.worker, pytest.mark.postgresql]


@pytest.fixture(scope="module")
def shop(start_shop: Callable[..., Shop]) -> Iterator[Shop]:
    with start_shop("sqlalchemy", "postgresql") as shop:
        yield shop


def rerun(shop: Shop, result: AsyncResult) -> int:
    """Runs the command; returns its exit code."""
    done = run_celery(
        *(shop.server, shop.database, "sqlalchemy"), "idempotency", "rerun", result.id, "--yes"
    )
    code: int = done.returncode
    return code


def test_the_row_of_an_error_is_forgotten(shop: Shop, order: str) -> None:
    result = shop.charge(order, "decline")
    eventually(lambda: result.failed(), "it is declined")

    assert rerun(shop, result) == 0

    shop.wait_for_start(order, 2)
    shop.wait_for_log("has been run again")
    assert shop.database.effects(order) == 0


def test_a_poisoned_task_writes_its_effect_once(shop: Shop, order: str) -> None:
    breakpoint_of(shop.breakpoints, order, "effect written").touch()
    result = shop.charge_in_one_attempt(order)
    with pytest.raises(PoisonedTaskError):
        result.get(timeout=SOON)

    shop.workers[0].kill("SIGSTOP")
    assert [rerun(shop, result), rerun(shop, result)] == [0, 0]
    shop.workers[0].kill("SIGCONT")

    eventually(lambda: shop.app.AsyncResult(result.id).successful(), "it succeeds")
    eventually(lambda: "gets the outcome of task" in shop.logs(), "the other one is a copy")
    assert shop.database.effects(order) == 1
