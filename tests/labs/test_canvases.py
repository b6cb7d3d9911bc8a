"""Runs ``make canvases`` with few canvases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.worker
@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_effect_happens_once(tmp_path: Path) -> None:
    # Not in this process, since it sets up Django.
    run = [sys.executable, "-m", "labs.canvases", "--ours", "--seeds=1", "--canvases=40"]
    subprocess.run([*run, "--logs", tmp_path], cwd=Path(__file__).parents[2], check=True)
