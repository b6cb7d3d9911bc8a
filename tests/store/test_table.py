"""Each script on each kind of record does what the model does; `make proof` makes more calls."""

from __future__ import annotations

from typing import Any

import pytest

from labs.verification import table, turn_table
from labs.verification.single_calls import mismatches
from tests.servers.redis_server import RedisServer


@pytest.mark.core
@pytest.mark.parametrize("script", table.ARGUMENTS)
def test_a_call_does_what_the_model_does(server: RedisServer, client: Any, script: str) -> None:
    assert list(mismatches(table, client, script, 2000)) == []


@pytest.mark.core
@pytest.mark.parametrize("script", turn_table.ARGUMENTS)
def test_a_call_with_a_turn_does_what_the_model_does(
    server: RedisServer, client: Any, script: str
) -> None:
    assert list(mismatches(turn_table, client, script, 800)) == []
