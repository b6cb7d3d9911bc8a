"""A periodic task with TASK_ID as its key: each tick runs once, copies of its message do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import eventually
from tests.worker.harness import Shop
from tests.worker.tasks import tick

pytestmark = [pytest.mark.exhaustive, pytest.mark.worker]

SCHEDULE = {"every half second": {"task": "shop.tick", "schedule": 0.5, "args": ["beaten"]}}


@pytest.fixture
def shop(open_shop: Callable[..., Shop], tmp_path: Path) -> Iterator[Shop]:
    with open_shop(beat_schedule=SCHEDULE, beat_max_loop_interval=0.2) as shop:
        shop.start_worker("--beat", "--schedule", str(tmp_path / "schedule"), concurrency=1)
        yield shop


def test_runs_once_per_tick_despite_copies(shop: Shop) -> None:
    third = shop.ledger.wait_for_run("beaten", number=3)

    # A redelivery of the third tick's message.
    tick.apply_async(("beaten",), task_id=third.task_id)
    shop.ledger.wait_for_signal(third.task_id, "replayed")
    eventually(lambda: len(shop.ledger.runs("beaten")) >= 5, "five ticks have run")

    ids = [run.task_id for run in shop.ledger.runs("beaten")]
    assert len(set(ids)) == len(ids)
