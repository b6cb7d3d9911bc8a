"""A process is killed at each point of a call: one effect, and one outcome for every caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

from tests.sql.conftest import LIBRARIES_AND_KINDS
from tests.sql.harness import Shop
from tests.sql.shop import POINTS
from tests.waiting import SOON

#: Where the row of an error is written, after the rollback of the effects.
ERROR_POINTS = ("row claimed", "outcome written", "committed")

pytestmark = [
    pytest.mark.worker,
    pytest.mark.parametrize("shop", LIBRARIES_AND_KINDS, indirect=True),
]


@dataclass(frozen=True)
class Killed:
    """What a call has left whose process was killed once."""

    reached: bool
    effects: int
    first: Any
    duplicate: Any


@pytest.fixture(scope="module")
def shop(request: pytest.FixtureRequest, start_shop: Callable[..., Shop]) -> Iterator[Shop]:
    with start_shop(*request.param) as shop:
        yield shop


def kill_at_each(shop: Shop, points: Sequence[str], end: str) -> dict[str, Killed]:
    """Charges one order for each point, all at once: Celery replaces dead processes every 5 s."""
    orders = {point: uuid4().hex for point in points}
    results = {point: shop.charge_and_kill(order, point, end) for point, order in orders.items()}
    firsts = {p: result.get(timeout=SOON, propagate=False) for p, result in results.items()}
    return {
        point: Killed(
            shop.was_killed(order, point),
            shop.database.effects(order),
            firsts[point],
            shop.charge(order, end).get(timeout=SOON, propagate=False),
        )
        for point, order in orders.items()
    }


class TestKilled:
    @pytest.fixture(scope="class")
    @classmethod
    def calls(cls, shop: Shop) -> dict[str, Killed]:
        return kill_at_each(shop, POINTS, "return")

    @pytest.mark.parametrize("point", POINTS)
    def test_effects_happen_once_and_all_callers_get_one_outcome(
        self, calls: dict[str, Killed], point: str
    ) -> None:
        call = calls[point]
        assert (call.reached, call.effects) == (True, 1)
        assert isinstance(call.first, str)
        assert call.duplicate == call.first


class TestKilledWithAnErrorThatEndsTheKey:
    @pytest.fixture(scope="class")
    @classmethod
    def calls(cls, shop: Shop) -> dict[str, Killed]:
        return kill_at_each(shop, ERROR_POINTS, "decline")

    @pytest.mark.parametrize("point", ERROR_POINTS)
    def test_has_no_effect_and_all_callers_get_it(
        self, calls: dict[str, Killed], point: str
    ) -> None:
        assert calls[point].reached
        assert calls[point].effects == 0
        assert type(calls[point].first).__name__ == "Declined"
        assert calls[point].duplicate.args == calls[point].first.args
