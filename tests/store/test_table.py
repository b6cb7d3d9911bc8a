"""Single calls of each script, and sequences of calls, do what the model does.

`make proof` makes more calls.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis.stateful import run_state_machine_as_test

from labs.verification import table, turn_table
from labs.verification.conformance import Machine, lengths
from labs.verification.single_calls import mismatches
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import RecordHarness, store_at


@pytest.mark.core
@pytest.mark.parametrize("script", table.ARGUMENTS)
def test_a_call_does_what_the_model_does(server: RedisServer, client: Any, script: str) -> None:
    assert list(mismatches(table, client, script, 2000)) == []


@pytest.mark.exhaustive
@pytest.mark.core
@pytest.mark.parametrize("script", turn_table.ARGUMENTS)
def test_a_call_with_a_turn_does_what_the_model_does(
    server: RedisServer, client: Any, script: str
) -> None:
    assert list(mismatches(turn_table, client, script, 800)) == []


@pytest.mark.exhaustive
def test_any_sequence_of_calls_keeps_the_contract(server: RedisServer, client: Any) -> None:
    harness = RecordHarness(store_at(server.url), client)

    run_state_machine_as_test(
        lambda: Machine(harness),  # type: ignore[arg-type]
        settings=lengths(examples=40, steps=30),
    )
