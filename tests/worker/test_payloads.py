"""Large results outside Redis, and results that nobody can read there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from celery_idempotent import DecryptionError, ResultNotStoredError, State
from tests.s3 import Bucket
from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.ledger import Ledger
from tests.worker.shop import KEYRING_VARIABLE, give, ship

pytestmark = pytest.mark.worker

SECRET = "VISA-1111-1111-1111"
LARGE = SECRET * 200

OLD, NEW = Fernet.generate_key().decode(), Fernet.generate_key().decode()


def give_twice(order: str, value: str = LARGE) -> list[str]:
    return [give.delay(order, value).get(timeout=SOON) for _ in range(2)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


class TestInADirectory:
    @pytest.fixture(scope="class")
    @classmethod
    def shared_shop(cls, open_shop: Callable[..., Shop], place: Path) -> Iterator[Shop]:
        with open_shop(
            idempotency_max_result_size=1000,
            idempotency_compression="gzip",
            idempotency_compression_threshold=5000,
            idempotency_offload_backend=f"file://{place}",
        ) as shop:
            shop.start_worker()
            yield shop

    def test_a_duplicate_gets_the_large_result(
        self, shop: Shop, ledger: Ledger, order: str, place: Path
    ) -> None:
        assert give_twice(order) == [LARGE, LARGE]

        assert len(ledger.runs(order)) == 1
        record = give.idempotency_record(order, LARGE)
        assert record.format == "@json"
        assert SECRET in (place / record.body.decode()).read_text()

    def test_compression_may_make_it_small_enough(self, shop: Shop, order: str) -> None:
        assert give_twice(order, LARGE * 2) == [LARGE * 2] * 2

        assert give.idempotency_record(order, LARGE * 2).format == "json+gzip"

    def test_a_depot_that_is_away_keeps_the_duplicate_waiting(
        self, shop: Shop, ledger: Ledger, order: str, place: Path
    ) -> None:
        give.delay(order, LARGE).get(timeout=SOON)
        found = place / give.idempotency_record(order, LARGE).body.decode()
        kept = found.rename(found.with_suffix(".away"))
        found.mkdir()
        duplicate = give.delay(order, LARGE)
        shop.workers[0].wait_for_log(f"for task {duplicate.id} is unavailable: idempotency_offload")
        found.rmdir()
        kept.rename(found)

        assert duplicate.get(timeout=SOON) == LARGE
        assert len(ledger.runs(order)) == 1

    def test_steps_outlive_the_worker_that_did_them(
        self, shop: Shop, ledger: Ledger, order: str
    ) -> None:
        values = ship.delay(order, "book", "killed").get(timeout=SOON)

        assert [value.split()[0] for value in values] == ["charge", "book", "mail"]
        assert ledger.notes(order) == ["charge", "book", "mail"]


class TestInS3:
    """Encrypted too: the bucket belongs to someone else."""

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

    def test_a_duplicate_gets_the_large_result_and_the_bucket_shows_none_of_it(
        self, shop: Shop, bucket: Bucket, ledger: Ledger, order: str
    ) -> None:
        assert give_twice(order) == [LARGE, LARGE]

        assert len(ledger.runs(order)) == 1
        record = give.idempotency_record(order, LARGE)
        assert record.format == "@!json"
        kept = bucket.objects()[record.body.decode()]
        assert len(kept) > len(LARGE)
        assert b"VISA" not in kept

    def test_an_object_that_was_deleted_is_told_and_nothing_runs(
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


class TestKeysThatAVaultGives:
    @pytest.mark.slow  # each deploy starts the worker again
    def test_are_rotated_and_one_is_lost(
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

            said = eventually(
                lambda: [line for line in worker.logs().splitlines() if "DecryptionError" in line],
                "the worker has told it",
            )
            assert len(said) == 1
            assert "raised expected: DecryptionError" in said[0]
            for secret in (OLD, NEW, SECRET):
                assert secret not in said[0]

            names = list(shop.redis.scan_iter("idem:*"))
            assert len(names) == 2
            assert not any(b"VISA" in shop.redis.get(name) for name in names)
            give.idempotency_forget(early, SECRET)
            assert give.delay(early, SECRET).get(timeout=SOON) == SECRET
            assert give.idempotency_record(late, SECRET).state is State.COMPLETED
