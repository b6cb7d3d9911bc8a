"""Each script on each kind of record does what the model does; `make proof` makes more calls."""

from __future__ import annotations

from typing import Any

import pytest

from labs.verification import table, turn_table
from tests.servers.redis_server import RedisServer


@pytest.mark.core
@pytest.mark.parametrize("script", table.ARGUMENTS)
def test_a_call_does_what_the_model_does(server: RedisServer, client: Any, script: str) -> None:
    assert list(table.mismatches(client, script)) == []


@pytest.mark.core
@pytest.mark.parametrize("script", turn_table.ARGUMENTS)
def test_a_call_with_a_turn_does_what_the_model_does(
    server: RedisServer, client: Any, script: str
) -> None:
    assert list(turn_table.mismatches(client, script, 800)) == []
