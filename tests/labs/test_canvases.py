"""Runs ``make canvases`` with few canvases."""

from __future__ import annotations

from pathlib import Path

import pytest

from labs.canvases.__main__ import EXPLAINED, run

pytestmark = [
    pytest.mark.worker,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.timeout(300),
]


def test_every_effect_happens_once(tmp_path: Path) -> None:
    wrong = run(1, 40, [], tmp_path, plain=False)

    assert wrong.keys() <= EXPLAINED
