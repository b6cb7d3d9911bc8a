"""The public interface changes only on purpose."""

from __future__ import annotations

import sys

import pytest

from tests.public_api.__main__ import SNAPSHOT, describe


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="signatures as by Python 3.11")
def test_the_public_interface_is_as_in_the_snapshot() -> None:
    assert describe() == SNAPSHOT.read_text(encoding="utf-8"), (
        "if this change is intended, run python -m tests.public_api and describe it in CHANGELOG.md"
    )
