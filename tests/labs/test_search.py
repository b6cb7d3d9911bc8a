"""The model keeps its invariants in every order of actions, and each guard is needed."""

from __future__ import annotations

import pytest

from labs.verification.environment import Environment
from labs.verification.guards import GUARDS, search_without
from labs.verification.scenarios import LIMITS, SCENARIOS
from labs.verification.search import format_counterexample, search
from tests.conftest import exhaustive_except

#: Scenarios of some seconds; `make proof` searches all.
SHORT = (
    "expired: frozen twice", "expired: late", "expired: three senders", "expired: errback",
    "expired: retry", "expired: replaced task", "expired: retention", "turn: hard limit",
    "turn: retention",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", exhaustive_except(SHORT, "expired: late", "expired: three senders", "turn: hard limit")
)
def test_every_invariant_holds_in_every_state(name: str) -> None:
    result = search(Environment(SCENARIOS[name]))

    found = result.counterexample
    assert found is None, "\n".join(["", *format_counterexample(found)])
    assert result.states > 100


@pytest.mark.parametrize(
    "guard", exhaustive_except(GUARDS, "mark", "confirm", "deadline", "slot ends")
)
def test_something_breaks_without_a_guard(guard: str) -> None:
    assert search_without(guard).counterexample is not None


@pytest.mark.parametrize("name", LIMITS)
def test_each_known_limit_has_a_counterexample(name: str) -> None:
    scenario, violation = LIMITS[name]

    counterexample = search(Environment(scenario)).counterexample

    assert counterexample is not None
    assert counterexample.violation == violation
