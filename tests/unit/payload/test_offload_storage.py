"""Offload storage in Celery's backends: a directory, memory, and S3 simulated by moto."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idempotent.extensions.offload import OffloadStorage, check
from tests.servers.moto_server import REGION, MotoServer
from tests.servers.redis_server import RedisServer

NAME = "shop.charge%2Fx:~PN0MlSPt3FmEwTzQ5dHvBQ:1763726400123457"

DATA = [
    *(b"", b'"text"', '"Zürich"'.encode(), bytes(range(256)), b"base64:", b"base64:MQ=="),
    *(b"\x80\x04}\x94.", b"\r\n\0\x1a", os.urandom(100_000)),
]


@pytest.fixture(scope="module")
def s3_settings() -> Iterator[dict[str, Any]]:
    """Settings of Celery's S3 backend, for a bucket of moto."""
    with MotoServer() as server:
        url, bucket = f"http://{server.address}", "results"
        server.session.resource("s3", endpoint_url=url).create_bucket(Bucket=bucket)
        settings = {"s3_endpoint_url": url, "s3_region": REGION, "s3_bucket": bucket}
        yield settings | {"s3_access_key_id": "testing", "s3_secret_access_key": "testing"}


@pytest.fixture(params=["file", "s3", "memory", "redis"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, server: RedisServer) -> OffloadStorage:
    if request.param == "s3":
        return OffloadStorage(make_app(**request.getfixturevalue("s3_settings")), "s3://")
    urls = {"file": f"file://{tmp_path}", "memory": "cache+memory://", "redis": server.url}
    check(make_app(), urls[request.param])
    return OffloadStorage(make_app(), urls[request.param])


def make_app(**settings: Any) -> Celery:
    app = Celery("offload", set_as_current=False)
    app.conf.update(settings)
    return app


def test_any_bytes_are_returned_unchanged(storage: OffloadStorage) -> None:
    for number, data in enumerate(DATA):
        storage.put(f"{NAME}{number}", data, 60)
    for number, data in enumerate(DATA):
        assert storage.get(f"{NAME}{number}") == data


def test_a_name_that_was_never_stored_or_is_deleted_has_no_data(storage: OffloadStorage) -> None:
    assert storage.get(f"{NAME}-never") is None
    storage.put(NAME, b"1", 60)
    storage.delete(NAME)
    assert storage.get(NAME) is None


def test_each_thread_has_its_own_backend(storage: OffloadStorage) -> None:
    backends = []

    def use() -> None:
        storage.get(NAME)
        backends.append(storage._backend())

    use()
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()

    assert storage._backend() is backends[0]
    assert backends[0] is not backends[1]


def test_the_backend_gets_the_retention() -> None:
    storage = OffloadStorage(make_app(), "cache+memory://")
    storage.put(NAME, b"1", 59.5)
    storage.put(NAME, b"1", 120)

    assert [storage._backend(seconds).expires for seconds in (60, 120)] == [60, 120]


def test_text_is_stored_unchanged(tmp_path: Path) -> None:
    OffloadStorage(make_app(), f"file://{tmp_path}").put(NAME, b'{"a": 1}', 60)

    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(NAME, '{"a": 1}')]


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    storage = OffloadStorage(make_app(), f"file://{tmp_path}/nowhere")

    for use in (lambda: storage.put(NAME, b"1", 60), lambda: storage.get(NAME)):
        with pytest.raises(Exception, match="path"):
            use()


@pytest.mark.parametrize("damage", ["base64:M", "base64:###", "base64:Zü"])
def test_damaged_data_is_returned_unchanged(tmp_path: Path, damage: str) -> None:
    (tmp_path / NAME).write_text(damage)

    assert OffloadStorage(make_app(), f"file://{tmp_path}").get(NAME) == damage.encode()
