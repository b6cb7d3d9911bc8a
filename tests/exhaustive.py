"""Parameters of tests that only ``make test-all`` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive_except(names: Iterable[str], *kept: str) -> list[Any]:
    """Returns `names` as parameters; those that are not in `kept` are marked exhaustive."""
    return [
        name if name in kept else pytest.param(name, marks=pytest.mark.exhaustive) for name in names
    ]
