"""The examples of the README, and of the page that continues them, work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import TASK_ID, IdempotentTask, KeyReusedError
from celery_idempotent.settings import PREFIX
from tests.apps import close
from tests.docs.pages import ROOT, block_with, prose, section
from tests.servers.redis_server import RedisServer

README = ROOT / "README.md"
TASK = ROOT / "docs/reference/task.md"


@pytest.mark.parametrize(
    ("page", "title", "number", "others"),
    [
        (README, "Choosing a mode", 4, {}),
        (ROOT / "docs/modes.md", "One at a time", 3, {"idempotency_until": "finished"}),
    ],
)
def test_the_modes_are_options_of_a_task(
    page: Path, title: str, number: int, others: dict[str, Any]
) -> None:
    modes = re.findall(r"^\| .* \| `(idempotency_[^`]+)`", section(prose(page), title), re.M)
    assert len(modes) == number
    for mode in modes:
        app = Celery("shop", backend="redis://", set_as_current=False)
        options = others | eval(f"dict({mode})", {"TASK_ID": TASK_ID})

        def task(order_id: int) -> None: ...

        made = app.task(task, base=IdempotentTask, shared=False, name="shop.task", **options)
        chosen = made.idempotency_configuration.settings
        assert {name: getattr(chosen, name.removeprefix(PREFIX)) for name in options} == options


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
        close(names["app"])


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

    exec(block_with(TASK, "record = charge.idempotency_record(42, amount=999)"), names)
    assert names["record"].result == "charged"

    names["charge"].delay(42, amount=999)
    assert charged == [(42, 999), (42, 999)]
