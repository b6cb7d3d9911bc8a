"""Any sequence of calls behaves as the model of the protocol; `make proof` runs longer ones."""

from __future__ import annotations

from typing import Any

from hypothesis.stateful import run_state_machine_as_test

from labs.verification.conformance import Machine, lengths
from tests.servers.redis_server import RedisServer
from tests.store.record_harness import RecordHarness, store_at


def test_any_sequence_of_calls_keeps_the_contract(server: RedisServer, client: Any) -> None:
    harness = RecordHarness(store_at(server.url), client)

    run_state_machine_as_test(
        lambda: Machine(harness),  # type: ignore[arg-type]
        settings=lengths(examples=40, steps=30),
    )
