"""Results that are offloaded, compressed or encrypted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from tests.waiting import SOON
from tests.worker.canvas_tasks import ship
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.tasks import give

pytestmark = pytest.mark.worker

SECRET = "VISA-1111-1111-1111"
LARGE = SECRET * 200
#: Too short to be compressed.
SHORT = SECRET * 40

OLD, NEW = Fernet.generate_key().decode(), Fernet.generate_key().decode()


def call_twice(order: str, value: str = LARGE) -> list[str]:
    return [give.delay(order, value).get(timeout=SOON) for _ in range(2)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


class TestInADirectory:
    @pytest.fixture(scope="class")
    @classmethod
    def shared_shop(cls, open_shop: Callable[..., Shop], directory: Path) -> Iterator[Shop]:
        with open_shop(
            idempotency_max_result_size=500,
            idempotency_compression="gzip",
            idempotency_offload_backend=f"file://{directory}",
        ) as shop:
            shop.start_worker()
            yield shop

    def test_duplicate_gets_the_large_result(
        self, ledger: Ledger, order: str, directory: Path
    ) -> None:
        assert call_twice(order, SHORT) == [SHORT, SHORT]

        assert len(ledger.runs(order)) == 1
        record = give.idempotency_record(order, SHORT)
        assert record.format == "@json"
        assert SECRET in (directory / record.body.decode()).read_text()

    def test_duplicate_waits_for_an_unavailable_backend(
        self, shop: Shop, ledger: Ledger, order: str, directory: Path
    ) -> None:
        give.delay(order, SHORT).get(timeout=SOON)
        path = directory / give.idempotency_record(order, SHORT).body.decode()
        moved = path.rename(path.with_suffix(".moved"))
        path.mkdir()
        duplicate = give.delay(order, SHORT)
        shop.workers[0].wait_for_log(f"{duplicate.id} cannot get its outcome: idempotency_offload")
        path.rmdir()
        moved.rename(path)

        assert duplicate.get(timeout=SOON) == SHORT
        assert len(ledger.runs(order)) == 1

    def test_steps_survive_their_worker(self, ledger: Ledger, order: str) -> None:
        values = ship.delay(order, "book", "killed").get(timeout=SOON)

        assert [value.split()[0] for value in values] == ["charge", "book", "mail"]
        assert ledger.notes(order) == ["charge", "book", "mail"]
