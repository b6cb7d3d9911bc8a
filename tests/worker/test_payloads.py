"""Results that are offloaded to a directory; `flow/test_offload` has more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import SOON
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import give

LARGE = "VISA-1111-1111-1111" * 40


@pytest.fixture(scope="module")
def directory(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("results")
    return path


@pytest.fixture(scope="module")
def shared_shop(open_shop: Callable[..., Shop], directory: Path) -> Iterator[Shop]:
    storage = f"file://{directory}"
    with open_shop(idempotency_max_result_size=500, idempotency_offload_backend=storage) as shop:
        shop.start_worker()
        yield shop


def test_duplicate_waits_for_an_unavailable_backend(
    shop: Shop, ledger: Ledger, order: str, directory: Path
) -> None:
    give.delay(order, LARGE).get(timeout=SOON)
    path = directory / give.idempotency_record(order, LARGE).body.decode()
    moved = path.rename(path.with_suffix(".moved"))
    path.mkdir()
    duplicate = give.delay(order, LARGE)
    shop.workers[0].wait_for_log(f"{duplicate.id} cannot get its outcome: idempotency_offload")
    path.rmdir()
    moved.rename(path)

    assert duplicate.get(timeout=SOON) == LARGE
    assert len(ledger.runs(order)) == 1
