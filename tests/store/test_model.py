"""Any sequence of calls, against the model of the protocol; `make proof` runs a long one."""

from __future__ import annotations

from hypothesis.stateful import run_state_machine_as_test

from tests.proof.conformance import Machine, lengths
from tests.store.scene import Scene


def test_any_sequence_of_calls_keeps_the_contract(scene: Scene) -> None:
    run_state_machine_as_test(
        lambda: Machine(scene),  # type: ignore[arg-type]
        settings=lengths(examples=60, steps=30),
    )
