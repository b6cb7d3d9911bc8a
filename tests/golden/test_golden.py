"""What versions before have stored is replayed, taken over and forgotten as it should be."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.core.record import layout
from tests.golden.cases import FOLDER
from tests.golden.messages import CASES
from tests.golden.shop import Shop
from tests.servers.redis_server import RedisServer

#: The states in each file, by file and case.
STATES: dict[tuple[str, str], Any] = {
    (file.stem, name): state
    for file in sorted(FOLDER.glob("layout-*.json"))
    for name, state in json.loads(file.read_text("utf-8")).items()
}


@pytest.fixture
def shop(server: RedisServer, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(server, tmp_path)
    yield shop
    shop.close()


@pytest.mark.core
@pytest.mark.parametrize(("file", "name"), STATES)
def test_what_a_version_before_has_stored(shop: Shop, file: str, name: str) -> None:
    state = STATES[file, name]
    shop.put(state)

    CASES[name].check(shop, state["kept"])


@pytest.mark.exhaustive  # the file of this layout has the same states
@pytest.mark.parametrize("name", CASES)
def test_what_this_version_stores(shop: Shop, name: str) -> None:
    kept = CASES[name].leave(shop)
    state = json.loads(json.dumps({"kept": kept, **shop.take()}))
    shop.put(state)

    CASES[name].check(shop, state["kept"])


def test_every_case_of_this_layout_is_kept() -> None:
    file = f"layout-{layout.VERSION}"

    assert {name for stem, name in STATES if stem == file} == set(CASES), (
        "run python -m tests.golden.test_golden"
    )


def write_missing_states() -> None:
    """Adds the states that this version leaves to the file of its layout, where that lacks them."""
    file = FOLDER / f"layout-{layout.VERSION}.json"
    written = json.loads(file.read_text("utf-8")) if file.exists() else {}
    with RedisServer.start(config={}) as server, tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            if name not in written:
                shop = Shop(server, Path(folder))
                kept = case.leave(shop)
                written[name] = {"kept": kept, **shop.take()}
                shop.close()
    file.write_text(json.dumps(dict(sorted(written.items())), indent=1) + "\n", "utf-8")
    print(f"{file} has {len(written)} cases")


if __name__ == "__main__":
    write_missing_states()
