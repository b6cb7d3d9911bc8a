"""All cases by name."""

from __future__ import annotations

from tests.golden import cases, messages
from tests.golden.cases import Case

CASES: dict[str, Case] = {**cases.CASES, **messages.CASES}
