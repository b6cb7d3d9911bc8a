"""An operator who is asked, while the task goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from celery_idempotent import State
from tests.waiting import SOON, eventually
from tests.worker.harness import REPOSITORY, Shop
from tests.worker.shop import SETTINGS_VARIABLE, pack

pytestmark = pytest.mark.worker


@contextmanager
def operator(shop: Shop, directory: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """``celery idempotency forget …``, once it asks; its input is yet to be written."""
    asked = directory / "asked"
    command = [sys.executable, "-m", "celery", "-A", "tests.worker.shop", "idempotency", "forget"]
    with (
        asked.open("w") as errors,
        subprocess.Popen(
            [*command, *words],
            cwd=REPOSITORY,
            env={**os.environ, SETTINGS_VARIABLE: json.dumps(shop.settings)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        eventually(lambda: "Forget" in asked.read_text(), "the operator is asked")
        yield process


@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
@pytest.mark.parametrize("by", ["arguments", "task id", "state"])
def test_an_outcome_that_came_after_the_question_stays(
    shop: Shop, order: str, tmp_path: Path, by: str, force: bool
) -> None:
    shop.ledger.hold(order)
    result = pack.delay(order)
    shop.ledger.wait_for_run(order)
    words = {
        "arguments": ["shop.pack", json.dumps([order])],
        "task id": [result.id],
        "state": ["--state", "STARTED", "--task", "shop.pack"],
    }[by]

    with operator(shop, tmp_path, *words, *["--force"] * force, "--json") as process:
        shop.ledger.release(order)
        receipt = result.get(timeout=SOON)
        told, _ = process.communicate("y\n", SOON)

    assert [one["case"] for one in json.loads(told)] == ["changed"]
    assert process.returncode == 1
    assert pack.idempotency_record(order).state is State.COMPLETED
    assert pack.delay(order).get(timeout=SOON) == receipt
    assert len(shop.ledger.runs(order)) == 1


def test_the_operator_is_told_what_to_do(shop: Shop, order: str, tmp_path: Path) -> None:
    shop.ledger.hold(order)
    result = pack.delay(order)
    shop.ledger.wait_for_run(order)

    with operator(shop, tmp_path, result.id) as process:
        shop.ledger.release(order)
        result.get(timeout=SOON)
        told, _ = process.communicate("y\n", SOON)

    assert "kept: it has changed meanwhile; show it, then forget it again" in told


def test_an_execution_that_goes_on_is_still_the_one_that_was_shown(
    shop: Shop, order: str, tmp_path: Path
) -> None:
    shop.ledger.hold(order)
    result = pack.delay(order)
    shop.ledger.wait_for_run(order)

    with operator(shop, tmp_path, result.id, "--force", "--json") as process:
        told, _ = process.communicate("y\n", SOON)

    assert [one["case"] for one in json.loads(told)] == ["forgotten"]
    shop.ledger.release(order)
    assert result.get(timeout=SOON)["receipt"]
    assert pack.idempotency_record(order) is None
