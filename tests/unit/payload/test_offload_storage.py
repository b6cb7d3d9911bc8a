"""Large payloads in Celery's own backends: a directory, and an S3 that moto plays."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idempotent.payload.offload_storage import BackendOffloadStorage
from tests.s3 import Bucket

NAME = "shop.charge%2Fx:PN0MlSPt3FmEwTzQ5dHvBQ:1763726400123457"

DATA = [
    b"",
    b'"text"',
    '"Zürich"'.encode(),
    bytes(range(256)),
    b"base64:",
    b"base64:MQ==",
    b"\x80\x04}\x94.",
    b"\r\n\0\x1a",
    os.urandom(100_000),
]


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with Bucket() as bucket:
        yield bucket


@pytest.fixture(params=["file", "s3", "memory"])
def offload_storage(request: pytest.FixtureRequest, tmp_path: Path) -> BackendOffloadStorage:
    if request.param == "s3":
        settings = request.getfixturevalue("bucket").settings
        return BackendOffloadStorage(celery(**settings), "s3://")
    url = {"file": f"file://{tmp_path}", "memory": "cache+memory://"}[request.param]
    return BackendOffloadStorage(celery(), url)


def celery(**settings: Any) -> Celery:
    app = Celery("depot", set_as_current=False)
    app.conf.update(settings)
    return app


def test_any_bytes_come_back_as_they_were(offload_storage: BackendOffloadStorage) -> None:
    for number, data in enumerate(DATA):
        offload_storage.put(f"{NAME}{number}", data, 60)
    for number, data in enumerate(DATA):
        assert offload_storage.get(f"{NAME}{number}") == data


def test_what_was_never_put_is_not_there(offload_storage: BackendOffloadStorage) -> None:
    assert offload_storage.get(f"{NAME}-never") is None


def test_what_was_deleted_is_not_there_any_more(offload_storage: BackendOffloadStorage) -> None:
    offload_storage.put(NAME, b"1", 60)
    offload_storage.delete(NAME)

    assert offload_storage.get(NAME) is None


def test_each_thread_has_a_client_of_its_own(offload_storage: BackendOffloadStorage) -> None:
    opened = []

    def use() -> None:
        offload_storage.get(NAME)
        opened.append(offload_storage._backend())

    use()
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()

    assert offload_storage._backend() is opened[0]
    assert opened[0] is not opened[1]


def test_the_backend_is_told_how_long_to_keep_it() -> None:
    offload_storage = BackendOffloadStorage(celery(), "cache+memory://")
    offload_storage.put(NAME, b"1", 59.5)
    offload_storage.put(NAME, b"1", 120)

    assert [offload_storage._backend(seconds).expires for seconds in (60, 120)] == [60, 120]


def test_a_directory_holds_text_as_it_is(tmp_path: Path) -> None:
    BackendOffloadStorage(celery(), f"file://{tmp_path}").put(NAME, b'{"a": 1}', 60)

    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(NAME, '{"a": 1}')]


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    offload_storage = BackendOffloadStorage(celery(), f"file://{tmp_path}/nowhere")

    for use in (lambda: offload_storage.put(NAME, b"1", 60), lambda: offload_storage.get(NAME)):
        with pytest.raises(Exception, match="path"):
            use()


@pytest.mark.parametrize("damage", ["base64:M", "base64:###", "base64:Zü"])
def test_damage_is_left_to_the_reader(tmp_path: Path, damage: str) -> None:
    (tmp_path / NAME).write_text(damage)

    assert BackendOffloadStorage(celery(), f"file://{tmp_path}").get(NAME) == damage.encode()
