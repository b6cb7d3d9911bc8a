"""What other programs are written against changes on purpose, or not at all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.public_api.describe import describe

SNAPSHOT = Path(__file__).with_name("snapshot.txt")


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="signatures are written as by 3.11")
def test_the_public_interface_is_as_in_the_snapshot() -> None:
    assert describe() == SNAPSHOT.read_text(encoding="utf-8"), (
        "if this change is meant, run python -m tests.public_api and describe it in CHANGELOG.md"
    )
