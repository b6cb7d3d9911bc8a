"""The model keeps its invariants in every order of actions, and each mistake is detected."""

from __future__ import annotations

from ast import literal_eval
from functools import cache
from typing import Any

import pytest

from labs.verification import turn_environments
from labs.verification.environment import Environment
from labs.verification.environments import LIMITS, SHORT
from labs.verification.model_mutants import MUTANTS, Mutant
from labs.verification.search import format_counterexample, search
from labs.verification.turn_environment import TurnEnvironment
from tests.conftest import exhaustive_except


@cache
def has_no_counterexample(arguments: str) -> bool:
    return search(Environment(**literal_eval(arguments))).counterexample is None


@pytest.mark.parametrize(
    "name", exhaustive_except(SHORT, "a crash", "lost replies", "a step", "fused completion")
)
def test_every_invariant_holds_in_every_state(name: str) -> None:
    result = search(Environment(**SHORT[name]))

    assert result.counterexample is None, "\n".join(
        ["", *format_counterexample(result.counterexample)]
    )
    assert result.states > 100


@pytest.mark.parametrize("arguments", turn_environments.SHORT.values(), ids=turn_environments.SHORT)
def test_every_invariant_of_a_turn_holds_in_every_state(arguments: dict[str, Any]) -> None:
    environment: Any = TurnEnvironment(**arguments)

    result = search(environment)

    assert result.counterexample is None, "\n".join(
        ["", *format_counterexample(result.counterexample)]
    )
    assert result.states > 50


@pytest.mark.parametrize("mutant", turn_environments.MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.exhaustive
def test_a_mistake_with_a_turn_is_detected(mutant: turn_environments.TurnMutant) -> None:
    assert mutant.search().counterexample is not None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.exhaustive
def test_a_mistake_is_detected(mutant: Mutant) -> None:
    # The same search without the mistake has no counterexample.
    assert has_no_counterexample(str(mutant.arguments))

    assert mutant.search().counterexample is not None


@pytest.mark.parametrize(("arguments", "violation"), LIMITS.values(), ids=LIMITS)
def test_each_known_limit_has_a_counterexample(arguments: dict[str, Any], violation: str) -> None:
    counterexample = search(Environment(**arguments)).counterexample

    assert counterexample.violation == violation
