"""Runs ``make canvases`` with few canvases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.worker
@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_effect_happens_once(tmp_path: Path) -> None:
    options = ["--ours", "--seeds", "1", "--canvases", "40", "--logs", str(tmp_path)]
    # Not in this process, since it sets up Django.
    subprocess.run([sys.executable, "-m", "labs.canvases", *options], cwd=ROOT, check=True)
