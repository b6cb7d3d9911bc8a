"""Runs ``make canvases`` with few canvases, and its publisher without a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from labs.canvases.publisher import persist

ROOT = Path(__file__).parents[2]


def test_a_publisher_gives_up_with_the_error() -> None:
    def publish() -> None:
        raise ConnectionRefusedError("port 1")

    with pytest.raises(TimeoutError, match=r"not published for 0\.1 s.*port 1"):
        persist(publish, timeout=0.1)


@pytest.mark.worker
@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_effect_happens_once(tmp_path: Path) -> None:
    options = ["--ours", "--seeds", "1", "--canvases", "40", "--logs", str(tmp_path)]
    # Not in this process, since it sets up Django.
    subprocess.run([sys.executable, "-m", "labs.canvases", *options], cwd=ROOT, check=True)
