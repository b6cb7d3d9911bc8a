"""Functions in a Django process: nested transactions, statements, migrations, messages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sql.conftest import case, kinds
from tests.sql.databases import names_of_tests

CALLS = "django_calls"

pytestmark = pytest.mark.parametrize("calls", [*kinds("sqlite"), case("pgbouncer")], indirect=True)


@pytest.mark.parametrize("name", names_of_tests(CALLS))
def test_in_a_django_process(calls: dict[str, Any], name: str) -> None:
    assert name not in calls, calls[name]
