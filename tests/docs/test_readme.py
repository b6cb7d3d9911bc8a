"""The examples at the beginning of the README work."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_idempotent import KeyReusedError
from celery_idempotent.testing.server import RedisServer
from tests.docs.test_docs import ROOT, block_with

README = ROOT / "README.md"


@pytest.fixture
def charged() -> list[tuple[int, int]]:
    """The charges that the gateway has received."""
    return []


@pytest.fixture
def names(charged: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """The names that the first example defines, with an eager app on a private server."""

    def charge(order_id: int, amount: int) -> str:
        charged.append((order_id, amount))
        return "charged"

    names: dict[str, Any] = {"__name__": "shop", "gateway": SimpleNamespace(charge=charge)}
    with RedisServer.start(config={}) as server:
        example = block_with(README, 'Celery("shop"').replace('"redis://"', repr(server.url))
        example = example.replace("backend=", "set_as_current=False, backend=")
        exec(example.replace("@app.task(", "@app.task(shared=False, "), names)
        names["app"].conf.update(task_always_eager=True, task_eager_propagates=True)
        yield names
        names["app"].close()


def test_a_duplicate_gets_the_first_result(
    names: dict[str, Any], charged: list[tuple[int, int]]
) -> None:
    first, duplicate, reused = block_with(README, "# another task id, the same result").splitlines()

    assert eval(first, names) == "charged"
    assert eval(duplicate, names) == "charged"
    with pytest.raises(KeyReusedError):
        eval(reused, names)

    assert charged == [(42, 999)]


def test_a_record_is_read_and_forgotten(
    names: dict[str, Any], charged: list[tuple[int, int]]
) -> None:
    names["charge"].delay(42, amount=999)

    exec(block_with(README, "charge.idempotency_record(42, amount=999)  #"), names)
    assert names["record"].result == "charged"

    names["charge"].delay(42, amount=999)
    assert charged == [(42, 999), (42, 999)]
