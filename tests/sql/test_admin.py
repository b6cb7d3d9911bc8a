"""The admin of outcomes, by Django's test client, with each kind of database and a real Redis."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sql.conftest import kinds
from tests.sql.databases import names_of_tests

CALLS = "admin_calls"


@pytest.mark.exhaustive
@pytest.mark.parametrize("calls", kinds("sqlite"), indirect=True)
@pytest.mark.parametrize("name", names_of_tests(CALLS))
def test_in_a_django_process(calls: dict[str, Any], name: str) -> None:
    assert name not in calls, calls[name]
