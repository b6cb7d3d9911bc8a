"""``celery idempotency forget`` during an execution, with its confirmation prompt."""

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
from tests.conftest import exhaustive_except
from tests.waiting import SOON, eventually
from tests.worker.harness import REPOSITORY, Shop
from tests.worker.shop import SETTINGS_VARIABLE
from tests.worker.tasks import pack

pytestmark = pytest.mark.worker


@contextmanager
def forget(shop: Shop, directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs ``celery idempotency forget …`` until it prompts for a confirmation."""
    prompt = directory / "prompt"
    command = [sys.executable, "-m", "celery", "-A", "tests.worker.shop", "idempotency", "forget"]
    with (
        prompt.open("w") as errors,
        subprocess.Popen(
            [*command, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, SETTINGS_VARIABLE: json.dumps(shop.settings)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        eventually(lambda: "Forget" in prompt.read_text(), "the command prompts")
        yield process


@pytest.mark.exhaustive
@pytest.mark.parametrize("force", exhaustive_except([False, True], False), ids=["", "force"])
@pytest.mark.parametrize("by", exhaustive_except(["arguments", "task id", "state"], "arguments"))
def test_outcome_stored_after_the_prompt_is_kept(
    shop: Shop, order: str, tmp_path: Path, by: str, force: bool
) -> None:
    result = shop.ledger.start(pack, order)
    arguments = {
        "arguments": ["shop.pack", json.dumps([order])],
        "task id": [result.id],
        "state": ["--state", "STARTED", "--task", "shop.pack"],
    }[by]

    with forget(shop, tmp_path, *arguments, *["--force"] * force, "--json") as process:
        shop.ledger.release(order)
        receipt = result.get(timeout=SOON)
        output, _ = process.communicate("y\n", SOON)

    assert [each["case"] for each in json.loads(output)] == ["changed"]
    assert process.returncode == 1
    assert pack.idempotency_record(order).state is State.COMPLETED
    assert pack.delay(order).get(timeout=SOON) == receipt
    assert len(shop.ledger.runs(order)) == 1


def test_output_says_what_to_do(shop: Shop, order: str, tmp_path: Path) -> None:
    result = shop.ledger.start(pack, order)

    with forget(shop, tmp_path, result.id) as process:
        shop.ledger.release(order)
        result.get(timeout=SOON)
        output, _ = process.communicate("y\n", SOON)

    assert "kept: it has changed since it was shown" in output


@pytest.mark.exhaustive
def test_running_execution_is_forgotten_despite_renewals(
    shop: Shop, order: str, tmp_path: Path
) -> None:
    result = shop.ledger.start(pack, order)

    with forget(shop, tmp_path, result.id, "--force", "--json") as process:
        output, _ = process.communicate("y\n", SOON)

    assert [each["case"] for each in json.loads(output)] == ["forgotten"]
    shop.ledger.release(order)
    assert result.get(timeout=SOON)["receipt"]
    assert pack.idempotency_record(order) is None
