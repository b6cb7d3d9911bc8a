"""Results that are offloaded, compressed or encrypted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from celery_idempotent import DecryptionError, ResultNotStoredError, State
from tests.s3 import Bucket
from tests.waiting import SOON
from tests.worker.canvas_tasks import ship
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.shop import KEYRING_VARIABLE
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
        self, shop: Shop, ledger: Ledger, order: str, directory: Path
    ) -> None:
        assert call_twice(order, SHORT) == [SHORT, SHORT]

        assert len(ledger.runs(order)) == 1
        record = give.idempotency_record(order, SHORT)
        assert record.format == "@json"
        assert SECRET in (directory / record.body.decode()).read_text()

    def test_compressed_result_may_stay_in_redis(self, shop: Shop, order: str) -> None:
        assert call_twice(order, LARGE) == [LARGE] * 2

        assert give.idempotency_record(order, LARGE).format == "json+gzip"

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

    def test_steps_survive_their_worker(self, shop: Shop, ledger: Ledger, order: str) -> None:
        values = ship.delay(order, "book", "killed").get(timeout=SOON)

        assert [value.split()[0] for value in values] == ["charge", "book", "mail"]
        assert ledger.notes(order) == ["charge", "book", "mail"]


class TestInS3:
    """Results in the bucket are encrypted."""

    @pytest.fixture(scope="class")
    @classmethod
    def bucket(cls) -> Iterator[Bucket]:
        with Bucket() as bucket:
            yield bucket

    @pytest.fixture(scope="class")
    @classmethod
    def shared_shop(cls, open_shop: Callable[..., Shop], bucket: Bucket) -> Iterator[Shop]:
        with open_shop(
            idempotency_max_result_size=1000,
            idempotency_offload_backend="s3://",
            idempotency_encryption_keys=[NEW, OLD],
            **bucket.settings,
        ) as shop:
            shop.start_worker()
            yield shop

    def test_large_result_is_encrypted_in_the_bucket(
        self, shop: Shop, bucket: Bucket, ledger: Ledger, order: str
    ) -> None:
        assert call_twice(order) == [LARGE, LARGE]

        assert len(ledger.runs(order)) == 1
        record = give.idempotency_record(order, LARGE)
        assert record.format == "@!json"
        kept = bucket.objects()[record.body.decode()]
        assert len(kept) > len(LARGE)
        assert b"VISA" not in kept

    def test_deleted_object_is_reported_and_nothing_runs(
        self, shop: Shop, bucket: Bucket, ledger: Ledger, order: str
    ) -> None:
        give.delay(order, LARGE).get(timeout=SOON)
        bucket.empty()

        with pytest.raises(ResultNotStoredError) as caught:
            give.delay(order, LARGE).get(timeout=SOON)

        record = give.idempotency_record(order, LARGE)
        assert str(caught.value) == (
            f"{record.key} has completed, but its result is no longer in "
            f"idempotency_offload_backend: {record.key}:{record.token}"
        )
        assert len(ledger.runs(order)) == 1

    def test_forgetting_deletes_the_object(self, shop: Shop, bucket: Bucket, order: str) -> None:
        give.delay(order, LARGE).get(timeout=SOON)
        name = give.idempotency_record(order, LARGE).body.decode()
        assert name in bucket.objects()

        assert give.idempotency_forget(order, LARGE) is True

        assert name not in bucket.objects()


@pytest.mark.exhaustive
class TestEncryptionKeysFromACallable:
    @pytest.mark.slow  # each deploy starts the worker again
    def test_rotation_and_a_lost_key(
        self,
        open_shop: Callable[..., Shop],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        order: str,
    ) -> None:
        keyring = tmp_path / "keyring"
        keyring.write_text(OLD)
        monkeypatch.setenv(KEYRING_VARIABLE, str(keyring))
        with open_shop(idempotency_encryption_keys="tests.worker.shop.read_keyring") as shop:
            worker = shop.start_worker(concurrency=1)
            early, late = f"{order} early", f"{order} late"
            give.delay(early, SECRET).get(timeout=SOON)

            keyring.write_text(f"{NEW} {OLD}")
            worker.restart()
            assert give.delay(early, SECRET).get(timeout=SOON) == SECRET
            give.delay(late, SECRET).get(timeout=SOON)

            keyring.write_text(NEW)
            worker.restart()
            assert give.delay(late, SECRET).get(timeout=SOON) == SECRET
            lost = give.delay(early, SECRET)
            with pytest.raises(DecryptionError, match="add the key, or forget"):
                lost.get(timeout=SOON)
            assert len(shop.ledger.runs(early)) == len(shop.ledger.runs(late)) == 1

            worker.wait_for_log("raised unexpected: DecryptionError")
            for secret in (OLD, NEW, SECRET):
                assert all(
                    secret not in line
                    for line in worker.logs().splitlines()
                    if "DecryptionError" in line
                )

            names = list(shop.redis.scan_iter("idem:shop.*"))
            assert len(names) == 2
            assert not any(b"VISA" in shop.redis.get(name) for name in names)
            give.idempotency_forget(early, SECRET)
            assert give.delay(early, SECRET).get(timeout=SOON) == SECRET
            assert give.idempotency_record(late, SECRET).state is State.COMPLETED
